"""The loop reports, writes checkpoints, goes on and stops, and the order of its samples."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tessera import progress
from tessera.jax import training
from tessera.jax.engines import TrainState
from tessera.jax.models import Layer, Model, Params, Values
from tessera.jax.plans import read_plan
from tessera.jax.samples import SampleOrder, permute
from tessera.jax.training import Training, train
from tessera.plans import ExecutionPlan

BATCH, SAMPLES, ITERATIONS = 4, 10, 6
PLAN = {"micro_batch": BATCH, "precision": "f32", "stages": [{"start": 0, "end": 1}]}


class CountingEngine:
    """An engine whose only parameter counts iterations, and whose losses a test may break."""

    broken_losses: tuple[int, ...] = ()
    broken_parameters: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.plan: ExecutionPlan = read_plan(PLAN)

    def initial_state(self, seed: int) -> TrainState:
        return TrainState({"count": {"value": jnp.zeros(())}}, {"count": jnp.zeros(())})

    def state_shapes(self) -> TrainState:
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shape = jax.ShapeDtypeStruct((), jnp.float32, sharding=place)
        return TrainState({"count": {"value": shape}}, {"count": shape})

    def run_iteration(
        self, state: TrainState, inputs: Values, targets: Values, iteration: int
    ) -> tuple[TrainState, jax.Array]:
        count = state.parameters["count"]["value"]
        assert float(count) == iteration or iteration in self.broken_parameters
        after = jnp.nan if iteration in self.broken_parameters else float(iteration + 1)
        loss = jnp.nan if iteration in self.broken_losses else 1 / (iteration + 1)
        parameters = {"count": {"value": jnp.asarray(after, jnp.float32)}}
        return TrainState(parameters, state.optimizer), jnp.asarray(loss)

    def evaluate(self, state: TrainState, inputs: Values, targets: Values) -> jax.Array:
        return jnp.zeros(())


def a_model() -> Model:
    def init(_key: jax.Array) -> Params:
        return {"value": jnp.zeros(())}

    def apply(params: Params, values: Values) -> Values:
        return values * params["value"]

    def loss(values: Values, targets: Values) -> jax.Array:
        return jnp.mean((values - targets) ** 2)

    return Model(layers=(Layer(name="count", init=init, apply=apply),), loss=loss)


def load(samples: Any) -> tuple[Values, Values]:
    inputs = np.asarray(samples, np.float32)[:, None]
    return inputs, inputs


def run(every: int = 100, **options: Any) -> None:
    train(
        a_model(),
        optax.sgd(1.0),
        load=load,
        samples=SAMPLES,
        iterations=ITERATIONS,
        batch=BATCH,
        every=every,
        **options,
    )


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let this process be a job's program on an engine of the test; return the job's folder."""
    monkeypatch.setattr(training, "build_engine", lambda *_, **__: CountingEngine())
    monkeypatch.setattr(progress, "REPORT_S", 0.0)
    for name, value in (("latest", {}), ("stop", False), ("checkpoints_asked", 0)):
        monkeypatch.setattr(progress._State, name, value)
    for name in ("broken_losses", "broken_parameters"):
        monkeypatch.setattr(CountingEngine, name, ())
    for name in ("TUNING_FILE", "RESUME_FROM", "RESUME_ITERATIONS", "ITERATIONS", "JOB_DIR"):
        monkeypatch.delenv(f"TESSERA_{name}", raising=False)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    for name, file in (("PLAN", "plan"), ("PROGRESS", "progress"), ("CONTROL", "control")):
        monkeypatch.setenv(f"TESSERA_{name}_FILE", str(tmp_path / f"{file}.json"))
    monkeypatch.setenv("TESSERA_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    previous = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, previous)


def checkpoints(job: Path) -> list[str]:
    return sorted(path.name for path in (job / "checkpoints").iterdir())


def reported(job: Path) -> Any:
    return json.loads((job / "progress.json").read_text())


def at(iteration: int, act: Callable[[], object]) -> Callable[[Training, float], None]:
    """Return what a user calls after each iteration, which acts after one of them."""

    def on_iteration(running: Training, _loss: float) -> None:
        if running.iterations == iteration:
            act()

    return on_iteration


def test_a_run_writes_its_losses_and_checkpoints(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(every=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"iteration {n} loss {1 / n:.6f}" for n in range(1, ITERATIONS + 1)]
    assert checkpoints(job) == ["iteration-4", "iteration-6"]
    assert reported(job)["iterations"] == ITERATIONS
    assert reported(job)["checkpoint"]["iterations"] == ITERATIONS


def test_a_stop_writes_a_checkpoint_from_which_a_later_start_goes_on(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(on_iteration=at(2, lambda: os.kill(os.getpid(), signal.SIGTERM)), ledger=job / "ledger")
    assert checkpoints(job) == ["iteration-3"]
    monkeypatch.setattr(progress._State, "stop", False)
    monkeypatch.setenv("TESSERA_RESUME_FROM", str(job / "checkpoints" / "iteration-3"))
    monkeypatch.setenv("TESSERA_RESUME_ITERATIONS", "3")
    monkeypatch.setenv("TESSERA_GENERATION", "1")
    run(ledger=job / "ledger")
    assert "iteration 4 loss" in capsys.readouterr().out
    files = [job / "ledger" / f"{generation}-0.jsonl" for generation in (0, 1)]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    used = [sample for line in lines for sample in line["samples"]]
    assert sorted(used[:SAMPLES]) == sorted(used[SAMPLES : 2 * SAMPLES]) == list(range(SAMPLES))


def test_a_request_for_a_checkpoint_is_met_once_and_training_goes_on(job: Path) -> None:
    def ask() -> None:
        (job / "control.json").write_text(json.dumps({"checkpoint": 1}))

    run(on_iteration=at(2, ask))
    assert checkpoints(job) == ["iteration-3", "iteration-6"]


def test_a_loss_that_is_not_finite_ends_the_job_before_a_checkpoint(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CountingEngine, "broken_losses", (3,))
    with pytest.raises(SystemExit) as end:
        run(every=2)
    assert end.value.code == 1
    assert checkpoints(job) == ["iteration-2"]
    assert json.loads((job / "failure.json").read_text())["reason"] == "loss_not_finite"
    assert capsys.readouterr().err.startswith("error: the loss of iteration 4 is nan; lower")


@pytest.mark.parametrize("stops", [True, False])
def test_no_checkpoint_has_parameters_that_are_not_finite(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stops: bool
) -> None:
    monkeypatch.setattr(CountingEngine, "broken_parameters", (3, 4, 5))
    if stops:
        with pytest.raises(SystemExit):
            run(every=2)
    else:
        run(every=2, stop_if_not_finite=False)
    assert checkpoints(job) == ["iteration-2"]
    assert "parameters are not finite after iteration 4" in capsys.readouterr().err
    assert (job / "failure.json").exists() == stops


def test_a_plan_for_another_model_is_refused_in_one_sentence(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = PLAN | {"stages": [{"start": 0, "end": 5}]}
    (job / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(SystemExit):
        run()
    assert json.loads((job / "failure.json").read_text())["reason"] == "refused"
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_checkpoint_ends_the_start_with_its_reason(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    path = job / "checkpoints" / f"iteration-{ITERATIONS}"
    next(file for file in path.glob("state/**/d/*") if file.is_file()).unlink()
    monkeypatch.setenv("TESSERA_RESUME_FROM", str(path))
    monkeypatch.setenv("TESSERA_RESUME_ITERATIONS", str(ITERATIONS))
    with pytest.raises(SystemExit):
        run()
    assert json.loads((job / "failure.json").read_text())["reason"] == "bad_checkpoint"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 1000, 4097])
def test_a_permutation_uses_each_sample_once(size: int) -> None:
    for epoch in range(3):
        permuted = permute(np.arange(size), size, (7, epoch))
        assert sorted(permuted.tolist()) == list(range(size))


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    keys = [(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    orders = {tuple(permute(np.arange(100), 100, key).tolist()) for key in keys}
    assert len(orders) == len(keys)
    assert tuple(range(100)) not in orders


@pytest.mark.parametrize(("samples", "batch", "iterations"), [(10, 4, 5), (3, 7, 6)])
def test_iterations_use_each_sample_once_in_an_epoch_even_across_its_end(
    samples: int, batch: int, iterations: int
) -> None:
    order = SampleOrder(samples=samples, batch=batch, seed=3)
    order.samples_of(77)  # what was asked before does not matter
    used = np.concatenate([order.samples_of(k) for k in range(iterations)]).tolist()
    epochs = [used[k : k + samples] for k in range(0, len(used) - samples + 1, samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_data_set_of_a_trillion_samples_needs_no_list_of_them() -> None:
    size = 10**12
    used = SampleOrder(samples=size, batch=1000, seed=5).samples_of(123_456)
    assert len(set(used.tolist())) == 1000
    assert used.min() >= 0
    assert used.max() < size
    eighths = np.bincount(used * 8 // size, minlength=8)
    assert eighths.min() > 60, "the samples of a batch must come from everywhere"


def test_neighbours_are_not_used_together() -> None:
    size = 1 << 16
    permuted = permute(np.arange(4096), size, (1, 0))
    assert np.mean(np.abs(np.diff(permuted)) < 16) < 0.01


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (1, 0)])
def test_an_order_of_nothing_is_refused(samples: int, batch: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SampleOrder(samples=samples, batch=batch, seed=0)
