"""Training that tunes at launch, with real engines on this process's device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tessera import progress
from tessera.jax.models import Layer, Model, Params, Values
from tessera.jax.training import Data, Training

BATCH, WIDTH, SEED = 8, 4, 3
PLANNED = {"micro_batch": BATCH, "precision": "f32", "stages": [{"start": 0, "end": 2}]}
OTHER = PLANNED | {"micro_batch": 4, "accumulation": 2}
TOO_WIDE = PLANNED | {"stages": [{"start": 0, "end": 2, "dp": 8}]}


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


def a_training() -> Training:
    data = Data(load=load, samples=64)
    return Training(a_model(), optax.adam(1e-2), data, batch=BATCH, seed=SEED)


def losses(training: Training) -> list[float]:
    return [float(training.step()) for _ in range(3)]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process be a program with a plan; return the folder of its files."""
    monkeypatch.setattr(progress._State, "latest", {})
    for name in ("TESSERA_TUNING_FILE", "TESSERA_RESUME_FROM", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TESSERA_PROGRESS_FILE", str(tmp_path / "progress.json"))
    monkeypatch.setenv("TESSERA_JOB_DIR", str(tmp_path))
    monkeypatch.setenv("TESSERA_PLAN_FILE", str(tmp_path / "plan.json"))
    (tmp_path / "plan.json").write_text(json.dumps(PLANNED))
    return tmp_path


def test_a_training_that_tunes_has_the_losses_of_one_that_did_not(
    start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = losses(a_training())
    tuning = {"budget_s": 1e9, "plans": [TOO_WIDE, OTHER]}
    (start / "tuning.json").write_text(json.dumps(tuning))
    monkeypatch.setenv("TESSERA_TUNING_FILE", str(start / "tuning.json"))
    tuned = a_training()
    assert tuned.iterations == 0
    np.testing.assert_allclose(losses(tuned), expected, atol=1e-6)
    reported = json.loads((start / "progress.json").read_text())["tuning"]
    assert reported["plan"] in (PLANNED, OTHER)
    assert tuned.plan.accumulation == reported["plan"].get("accumulation", 1)
    assert 0 < reported["iteration_s"] <= reported["planned_s"]
    assert "tried 3 of 3 plans" in (said := capsys.readouterr().err)
    assert "1 failed, e.g. the plan needs 8 devices" in said


def test_a_training_that_does_not_tune_runs_by_its_plan_and_reports_none(start: Path) -> None:
    assert a_training().plan.micro_batch == BATCH
    assert not (start / "progress.json").exists()
