"""Any plan goes on from the checkpoint of any other, and what is no whole checkpoint is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

import pytest

from tests.support.jax_programs import FAST_COMPILATION, ROOT, make_plan
from tests.support.patience import PATIENCE_S

TOLERANCE: Final = 1e-5
"""The largest difference of losses at float32."""

PIPELINE: Final = {
    "stages": [{"start": 0, "end": 1, "dp": 2}, {"start": 1, "end": 4, "tp": 2}],
    "micro_batch": 4,
    "accumulation": 2,
    "precision": "f32",
}
PLANS: Final[dict[str, dict[str, Any]]] = {
    "one device": make_plan(),
    "DP 2 x TP 2": make_plan(dp=2, tp=2),
    "TP 4": make_plan(tp=4),
    "ZeRO-3": make_plan(dp=4, zero=3),
    "states on the host": make_plan(dp=4, zero=1, offload="optimizer"),
    "all on the host": make_plan(dp=4, zero=3, offload="parameters"),
    "a pipeline": PIPELINE,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the program of ``jax_restarts`` found, which saves under DP 4."""
    work = {
        "folder": str(tmp_path_factory.mktemp("checkpoints")),
        "saving": make_plan(dp=4),
        "alone": make_plan(),
        "plans": PLANS,
    }
    flags = f"--xla_force_host_platform_device_count=4 {FAST_COMPILATION}"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.jax_restarts"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        input=json.dumps(work),
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return dict(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_goes_on_from_a_checkpoint_of_another(results: dict[str, Any], name: str) -> None:
    resumed = results["resumed"][name]
    assert resumed["is_equal"]
    assert resumed["is_placed"]
    undisturbed = results["undisturbed"][-len(resumed["losses"]) :]
    assert resumed["losses"] == pytest.approx(undisturbed, abs=TOLERANCE, rel=0)


def test_a_whole_checkpoint_leaves_no_partial_one_behind(results: dict[str, Any]) -> None:
    assert results["names"] == ["iteration-4"]


def test_each_missing_or_short_file_is_refused(results: dict[str, Any]) -> None:
    damages = results["damages"]
    assert len(damages) > 10
    assert [name for name, refusal in damages.items() if not refusal] == []
    shards = [text for name, text in damages.items() if "/d/" in name]
    assert shards
    assert all("go on from an earlier checkpoint" in text for text in shards)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("another model", "of another model: experts/down is missing there and float32[4, 64, 32]"),
        ("another optimizer", "of another optimizer: block-0/0/count is int32[] there and missing"),
        ("another iteration", "is of iteration 4, not 5"),
        ("another seed", "written with seed 7, but the program has 8"),
        ("a later format", "has format 99, and this release reads 1; update"),
        ("no description", "has no readable model.json"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    results: dict[str, Any], name: str, text: str
) -> None:
    assert text in results["others"][name]
