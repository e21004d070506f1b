"""Pipelines that really train on virtual devices: their losses are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.laws import IS_NIGHT
from tests.support.pipeline_programs import ITERATIONS, a_case, run_cases

TOLERANCE = 1e-5

CASES = {
    "one stage": a_case(micro_batch=16),
    "pp 4, gpipe": a_case(1, 2, 3, micro_batch=4, accumulation=4, schedule="gpipe"),
    "pp 4, 1f1b, clipped": a_case(1, 2, 3, micro_batch=4, accumulation=4, clip_norm=0.5),
    "pp 2 x tp 2, recomputation": a_case(
        2, divisions=2 * [{"tp": 2}], micro_batch=8, accumulation=2, recomputation="full"
    ),
    "pp 2 x dp 2, zero 3": a_case(
        2, divisions=2 * [{"dp": 2}], micro_batch=4, accumulation=4, zero=3
    ),
    "unequal 2 + 1 + 1, zero 1": a_case(
        2, 3, divisions=[{"dp": 2}, {}, {}], micro_batch=4, accumulation=4, zero=1
    ),
    "unequal tp 2 + dp 4 + 1, zero 2, clipped": a_case(
        1, 3, divisions=[{"tp": 2}, {"dp": 4}, {}], micro_batch=4, accumulation=4, zero=2,
        clip_norm=0.5,
    ),
    "interleaved, 2 chunks": a_case(
        1, 2, 3, micro_batch=2, accumulation=8, schedule="interleaved", chunks=2
    ),
    "interleaved, 2 chunks of dp 2 x tp 2 with sp": a_case(
        1, 2, 3, divisions=4 * [{"dp": 2, "tp": 2, "sp": True}], micro_batch=4, accumulation=4,
        schedule="interleaved", chunks=2, recomputation="selective",
    ),
    "experts on ep 2": a_case(
        2, 3, kind="experts", divisions=[{"dp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {}],
        micro_batch=8, accumulation=2,
    ),
    "a stage without parameters, clipped": a_case(
        1, 3, kind="bare", micro_batch=8, accumulation=2, clip_norm=0.5
    ),
    "offload of the optimizer": a_case(2, micro_batch=8, accumulation=2, offload="optimizer"),
    "offload of parameters": a_case(
        2, divisions=[{"dp": 2}, {}], micro_batch=8, accumulation=2, zero=3, offload="parameters"
    ),
}  # fmt: skip

ROUGH = {
    "one stage": a_case(micro_batch=16, precision="bf16"),
    "pp 4, zero 3": a_case(
        1, 3, divisions=[{"dp": 2}, {"dp": 2}, {}], micro_batch=4, accumulation=4, zero=3,
        precision="bf16",
    ),
}  # fmt: skip

RANDOM = {
    "one stage": a_case(kind="random", micro_batch=16),
    "pp 4": a_case(1, 2, 3, kind="random", micro_batch=4, accumulation=4),
    "unequal, recomputation": a_case(
        1, 3, kind="random", divisions=[{"dp": 2}, {"tp": 2}, {}], micro_batch=4, accumulation=4,
        recomputation="full",
    ),
}  # fmt: skip

ALIKE = {
    "four stages": a_case(1, 2, 3, micro_batch=4, accumulation=4),
    "six stages": a_case(1, 2, 3, 4, 5, blocks=4, micro_batch=4, accumulation=4),
    "four stages of two devices": a_case(
        1, 2, 3, divisions=4 * [{"tp": 2}], micro_batch=4, accumulation=4
    ),
}

FIXED = {"four stages": a_case(1, 2, 3, micro_batch=4, accumulation=4, is_fixed=True)}
"""Programs cannot be moved, as on a back end that cannot serialize them."""


RARE = frozenset(
    {
        "pp 4, gpipe",
        "unequal 2 + 1 + 1, zero 1",
        "interleaved, 2 chunks",
        "a stage without parameters, clipped",
        "offload of the optimizer",
    }
)
"""Plans that only the full tests train. Each is much like another one."""
TRAINED = {name: case for name, case in CASES.items() if IS_NIGHT or name not in RARE}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    groups = {"plain": TRAINED, "rough": ROUGH, "random": RANDOM, "alike": ALIKE, "fixed": FIXED}
    cases = {
        f"{group}: {name}": case for group, some in groups.items() for name, case in some.items()
    }
    return run_cases(cases)


@pytest.mark.parametrize("name", TRAINED)
def test_a_plan_has_the_losses_of_plain_jax_without_copies_and_waits(
    results: dict[str, Any], name: str
) -> None:
    result = results[f"plain: {name}"]
    losses = [*result["losses"], result["evaluation"]]
    assert len(losses) == ITERATIONS + 1
    assert losses == pytest.approx(result["plain"], abs=TOLERANCE, rel=0)
    assert losses[-1] < losses[0] - 0.1  # it learns
    assert result["is_in_place"]  # the state stays where it is restored
    assert result["reads"] == 0  # the host waits for no array within an iteration
    if name != "one stage":
        assert result["kept_parameters"] == 0  # by passes


def test_bfloat16_trains_like_one_stage_and_keeps_no_copies(results: dict[str, Any]) -> None:
    one, result = results["rough: one stage"], results["rough: pp 4, zero 3"]
    assert result["losses"] == pytest.approx(one["losses"], abs=0.05, rel=0)
    assert result["losses"] != pytest.approx(results["plain: one stage"]["losses"], abs=TOLERANCE)
    assert result["kept_parameters"] == 0


@pytest.mark.parametrize("name", RANDOM)
def test_random_layers_draw_the_same_numbers_under_each_plan(
    results: dict[str, Any], name: str
) -> None:
    one, result = results["random: one stage"], results[f"random: {name}"]
    assert result["losses"] == pytest.approx(one["losses"], abs=TOLERANCE, rel=0)
    assert one["losses"] != pytest.approx(results["plain: one stage"]["losses"], abs=1e-3)


def test_equal_middle_stages_share_their_programs(results: dict[str, Any]) -> None:
    four, six = results["alike: four stages"], results["alike: six stages"]
    assert six["compilations"] == four["compilations"]
    assert six["moves"] > four["moves"] > 0
    compiled = "/jax/core/compile/backend_compile_duration"
    assert six["events"][compiled] == six["compilations"]


@pytest.mark.parametrize("name", ALIKE)
def test_programs_on_other_devices_compute_the_same(results: dict[str, Any], name: str) -> None:
    result = results[f"alike: {name}"]
    assert result["moves"] > 0
    losses = [*result["losses"], result["evaluation"]]
    assert losses == pytest.approx(result["plain"], abs=TOLERANCE, rel=0)


def test_programs_that_cannot_be_moved_are_compiled_for_each_stage(results: dict[str, Any]) -> None:
    movable, fixed = results["alike: four stages"], results["fixed: four stages"]
    assert fixed["moves"] == 0
    assert fixed["compilations"] == movable["compilations"] + movable["moves"]
    assert fixed["losses"] == movable["losses"]


def test_later_processes_read_programs_from_the_persistent_cache(tmp_path: Path) -> None:
    """A process that read a program cannot move it, so the second one still compiles some."""
    cases = {"four stages": ALIKE["four stages"]}
    runs = [
        run_cases(cases, JAX_COMPILATION_CACHE_DIR=str(tmp_path))["four stages"] for _ in range(3)
    ]
    hits = [run["events"].get("/jax/compilation_cache/cache_hits", 0) for run in runs]
    misses = [run["events"].get("/jax/compilation_cache/cache_misses", 0) for run in runs]
    assert (hits[0], misses[0]) == (0, hits[1])
    assert misses[0] >= runs[0]["compilations"]
    assert misses[1] == runs[0]["moves"] > 0
    assert (hits[2], misses[2]) == (hits[1] + misses[1], 0)
    assert runs[0]["losses"] == runs[1]["losses"] == runs[2]["losses"]
