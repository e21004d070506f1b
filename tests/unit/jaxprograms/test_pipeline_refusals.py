"""Refusals of pipelines, and batches of other types. One device is enough: two chunks share it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tessera.jax.build import build_engine
from tessera.jax.errors import PlanRefused
from tessera.jax.pipelines import PipelineEngine
from tessera.plans import ExecutionPlan, PlanStage
from tests.support.pipeline_models import BATCH, a_language_model, some_batches

MODEL = a_language_model(0)
CHUNKS = (PlanStage(start=0, end=1), PlanStage(start=1, end=2))


def a_plan(**fields: Any) -> ExecutionPlan:
    usual: dict[str, Any] = {
        "micro_batch": BATCH // 2,
        "accumulation": 2,
        "schedule": "interleaved",
        "chunks": 2,
        "precision": "f32",
    }
    return ExecutionPlan(**{"stages": CHUNKS, **usual, **fields})


def an_engine(plan: ExecutionPlan) -> Any:
    return build_engine(MODEL, optax.sgd(0.1), plan, jax.devices(), seed=1)


def test_stages_on_several_hosts_are_refused() -> None:
    devices: Any = [SimpleNamespace(process_index=index) for index in range(2)]
    plan = a_plan(schedule="1f1b", chunks=1)
    with pytest.raises(PlanRefused, match="pipelines run on one host"):
        PipelineEngine(MODEL, optax.sgd(0.1), plan, devices, seed=1)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"precision": "fp8"}, "precision is fp8; tessera.jax knows f32, bf16"),
        ({"stages": tuple(replace(stage, cp=2) for stage in CHUNKS)}, "cp"),
    ],
)
def test_plans_that_only_other_runtimes_can_run_are_refused(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(PlanRefused, match=problem):
        an_engine(a_plan(**fields))


def test_batches_of_64_bit_numbers_train_as_those_of_32_bits_and_other_sizes_are_refused() -> None:
    engine = an_engine(a_plan())
    words = some_batches(1)[0]
    half = words[: BATCH // 2]
    with pytest.raises(PlanRefused, match="give whole global batches"):
        engine.run_iteration(engine.initial_state(1), half, half, 0)
    assert engine.library.compilations == 2  # what made the state
    losses = [
        float(engine.run_iteration(engine.initial_state(1), given, given, 0)[1])
        for given in (words, words.astype(np.int64))
    ]
    assert losses[0] == losses[1]
