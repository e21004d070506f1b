"""Tuning at launch in a training program: what is tried, in which order, and what is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tessera import progress
from tessera.jax.engines import TrainState
from tessera.jax.errors import PlanRefused
from tessera.jax.models import Layer, Model, Params, Values
from tessera.jax.training import Data, Training
from tessera.jax.tuning import (
    MAX_ENDED_STARTS,
    MEASURED_ITERATIONS,
    WARM_UP_ITERATIONS,
    Tuning,
    try_plans,
    tune,
)
from tessera.plans import ExecutionPlan

DATA = np.zeros((8, 2), dtype=np.float32)


def a_plain(tp: int, **fields: Any) -> dict[str, Any]:
    stage = {"start": 0, "end": 4, "dp": 8 // tp, "tp": tp}
    return {"stages": [stage], "micro_batch": 8, "shape": [8], "model": "m/1B"} | fields


PLANNED, FAST, SLOW, BROKEN = (a_plain(tp) for tp in (1, 2, 4, 8))


@pytest.fixture(autouse=True)
def without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the collection of garbage, which is slow and has no arrays of failed plans here."""
    monkeypatch.setattr("tessera.jax.tuning.gc.collect", lambda: 0)


class Workshop:
    """Engines that take the seconds of their plan, by a clock that only they advance."""

    def __init__(self, seconds: dict[int, float], compile_s: float = 1.0) -> None:
        self.now_s = 0.0
        self.made: list[int] = []
        self._seconds, self._compile_s = seconds, compile_s

    def clock(self) -> float:
        return self.now_s

    def make(self, plan: ExecutionPlan) -> Any:
        (stage,) = plan.stages
        self.made.append(stage.tp)
        return FakeEngine(self, self._seconds.get(stage.tp, math.nan), self._compile_s)


class FakeEngine:
    def __init__(self, shop: Workshop, seconds: float, compile_s: float) -> None:
        self.shop, self.seconds, self.compile_s = shop, seconds, compile_s

    def initial_state(self, seed: int) -> TrainState:
        if math.isnan(self.seconds):
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes")
        self.shop.now_s += self.compile_s
        return TrainState(parameters={"a": np.zeros(2)}, optimizer={})

    def run_iteration(
        self, state: TrainState, inputs: Any, targets: Any, iteration: int
    ) -> tuple[TrainState, Any]:
        self.shop.now_s += self.seconds * (1.0 if iteration >= WARM_UP_ITERATIONS else 7.0)
        return state, np.float32(0.5)


def choose(shop: Workshop, budget_s: float = 1e9, notes: Path | None = None) -> Tuning:
    plans = [FAST, PLANNED, SLOW, BROKEN, FAST]
    return try_plans(shop.make, PLANNED, plans, budget_s, DATA, DATA, clock=shop.clock, notes=notes)


SECONDS = {1: 3.0, 2: 2.0, 4: 4.0}
PLAN_S = 1.0 + 7.0 * WARM_UP_ITERATIONS * 3.0 + MEASURED_ITERATIONS * 3.0
"""What the trial of PLANNED takes."""


def test_each_plan_is_tried_once_and_the_planned_one_first() -> None:
    shop = Workshop(SECONDS)
    tuning = choose(shop)
    assert shop.made == [1, 2, 4, 8]
    assert [trial.iteration_s for trial in tuning.trials] == [3.0, 2.0, 4.0, math.inf]
    assert tuning.best is not None
    assert (tuning.best.plan, tuning.plans) == (FAST, 4)


def test_a_plan_that_fails_is_left_behind_and_named() -> None:
    tuning = choose(Workshop(SECONDS))
    assert tuning.trials[-1].problem == "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"
    assert str(tuning).startswith("tuning tried 4 of 4 plans in ")
    assert "the best takes 2 s an iteration, the planned one 3 s; 1 failed, e.g. RES" in str(tuning)
    alone = try_plans(Workshop({}).make, PLANNED, [a_plain(2, cp=1)], 9.0, DATA, DATA)
    assert alone.best is None


@pytest.mark.parametrize(("budget_s", "tried"), [(0.0, 1), (PLAN_S, 1), (PLAN_S + 0.1, 2)])
def test_the_budget_counts_compilation_and_is_looked_at_before_each_plan(
    budget_s: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Workshop(SECONDS)
    tuning = choose(shop, budget_s)
    assert len(tuning.trials) == tried
    assert (tuning.spent_s, tuning.plans) == (shop.now_s, 4)
    monkeypatch.setattr(progress, "stop_requested", lambda: True)  # this also ends the tuning
    assert len(choose(Workshop(SECONDS)).trials) == 1


def test_a_plan_of_a_later_release_is_refused_and_the_others_are_tried() -> None:
    later = a_plain(2, warp=9)
    shop = Workshop(SECONDS)
    tuning = try_plans(shop.make, PLANNED, [later, SLOW], 1e9, DATA, DATA, clock=shop.clock)
    assert "cannot be read" in tuning.trials[1].problem
    assert shop.made == [1, 4]

    def refuse(plan: ExecutionPlan) -> Any:
        raise PlanRefused("the model may not be cut there")

    refused = try_plans(refuse, PLANNED, [FAST], 1e9, DATA, DATA)
    assert [trial.problem for trial in refused.trials] == ["the model may not be cut there"] * 2


def test_a_plan_that_ended_two_starts_is_left_out_and_others_are_not(tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"

    def die(plan: ExecutionPlan) -> Any:
        if plan.stages[0].tp == 2:
            raise KeyboardInterrupt  # nothing catches it, as nothing catches a kill
        return Workshop(SECONDS).make(plan)

    for _ in range(MAX_ENDED_STARTS):
        with pytest.raises(KeyboardInterrupt):
            try_plans(die, PLANNED, [FAST, SLOW], 1e9, DATA, DATA, notes=notes)
    shop = Workshop(SECONDS)
    for _ in range(2):
        tuning = choose(shop, notes=notes)
        assert [trial.is_left_out for trial in tuning.trials] == [False, True, False, False]
        assert tuning.trials[1].problem == "it ended earlier starts of the job"
    assert set(shop.made) == {1, 4, 8}


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"x": "many"}'])
def test_damaged_notes_count_as_none(tmp_path: Path, damage: str) -> None:
    notes = tmp_path / "notes.json"
    notes.write_text(damage)
    assert not any(trial.is_left_out for trial in choose(Workshop(SECONDS), notes=notes).trials)
    assert json.loads(notes.read_text()) == {}


def let_program_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any] = PLANNED
) -> None:
    """Let this process be a program with a plan, whose files are in ``folder``."""
    monkeypatch.setattr(progress._State, "latest", {})
    monkeypatch.setenv("TESSERA_PROGRESS_FILE", str(folder / "progress.json"))
    monkeypatch.setenv("TESSERA_JOB_DIR", str(folder))
    monkeypatch.setenv("TESSERA_PLAN_FILE", str(folder / "plan.json"))
    (folder / "plan.json").write_text(json.dumps(plan))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function that lets a program tune, and returns what it has reported."""

    def run(shop: Workshop, *plans: dict[str, Any]) -> dict[str, Any]:
        let_program_run(tmp_path, monkeypatch)
        monkeypatch.setenv("TESSERA_TUNING_FILE", str(tmp_path / "tuning.json"))
        (tmp_path / "tuning.json").write_text(json.dumps({"budget_s": 1e9, "plans": plans}))
        chosen = tune(shop.make, lambda: (DATA, DATA), clock=shop.clock)
        written = json.loads((tmp_path / "progress.json").read_text())["tuning"]
        assert written["began_s"] <= written["ended_s"]
        assert written.get("plan", PLANNED) == chosen
        return dict(written)

    return run


def test_the_winner_is_reported_with_both_times(
    start: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    written = start(Workshop(SECONDS), FAST, BROKEN)
    assert (written["plan"], written["iteration_s"], written["planned_s"]) == (FAST, 2.0, 3.0)
    assert "tuning tried 3 of 3 plans" in capsys.readouterr().err
    assert start(Workshop({2: 2.0}), FAST)["planned_s"] is None  # the planned one does not run
    assert "plan" not in start(Workshop({}), FAST)  # none runs, and the planned one stays


def test_nothing_is_tried_unless_the_job_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shop = Workshop(SECONDS)
    monkeypatch.delenv("TESSERA_TUNING_FILE", raising=False)
    monkeypatch.delenv("TESSERA_PLAN_FILE", raising=False)
    assert tune(shop.make, lambda: (DATA, DATA)) is None
    (tmp_path / "plan.json").write_text(json.dumps(PLANNED))
    monkeypatch.setenv("TESSERA_PLAN_FILE", str(tmp_path / "plan.json"))
    assert tune(shop.make, lambda: (DATA, DATA)) == PLANNED
    assert shop.made == []


BATCH, WIDTH, SEED = 8, 4, 3
REAL_PLAN = {"micro_batch": BATCH, "precision": "f32", "stages": [{"start": 0, "end": 2}]}
OTHER = REAL_PLAN | {"micro_batch": 4, "accumulation": 2}
TOO_WIDE = REAL_PLAN | {"stages": [{"start": 0, "end": 2, "dp": 8}]}


def a_model() -> Model:
    def init(key: jax.Array) -> Params:
        return {"kernel": jax.random.normal(key, (WIDTH, WIDTH))}

    def apply(params: Params, x: Values) -> Values:
        return jnp.tanh(x @ params["kernel"])

    def loss(values: Values, targets: Values) -> jax.Array:
        return jnp.mean((values - targets) ** 2)

    layers = tuple(Layer(name=f"layer-{k}", init=init, apply=apply) for k in range(2))
    return Model(layers=layers, loss=loss)


def load(samples: Any) -> tuple[Values, Values]:
    inputs = np.sin(np.outer(np.asarray(samples) + 1, np.arange(1, WIDTH + 1)), dtype=np.float32)
    return inputs, np.cos(inputs)


def losses_of(tmp_path: Path) -> tuple[Training, list[float], bool]:
    """Return a training of 3 steps, its losses, and whether it reported a tuning."""
    data = Data(load=load, samples=64)
    training = Training(a_model(), optax.adam(1e-2), data, batch=BATCH, seed=SEED)
    assert training.iterations == 0
    losses = [float(training.step()) for _ in range(3)]
    return training, losses, (tmp_path / "progress.json").exists()


@pytest.mark.full
def test_a_training_that_tunes_has_the_losses_of_one_that_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TESSERA_TUNING_FILE", "TESSERA_RESUME_FROM", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    let_program_run(tmp_path, monkeypatch, REAL_PLAN)
    plain, expected, has_reported = losses_of(tmp_path)
    assert (plain.plan.micro_batch, has_reported) == (BATCH, False)
    tuning = {"budget_s": 1e9, "plans": [TOO_WIDE, OTHER]}
    (tmp_path / "tuning.json").write_text(json.dumps(tuning))
    monkeypatch.setenv("TESSERA_TUNING_FILE", str(tmp_path / "tuning.json"))
    tuned, losses, _ = losses_of(tmp_path)
    np.testing.assert_allclose(losses, expected, atol=1e-6)
    reported = json.loads((tmp_path / "progress.json").read_text())["tuning"]
    assert reported["plan"] in (REAL_PLAN, OTHER)
    assert tuned.plan.accumulation == reported["plan"].get("accumulation", 1)
    assert 0 < reported["iteration_s"] <= reported["planned_s"]
    text = capsys.readouterr().err
    assert "tried 3 of 3 plans" in text
    assert "1 failed, e.g. the plan needs 8 devices" in text
