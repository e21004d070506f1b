"""Trains tiny models by pipelines in a child process, because XLA fixes the number of devices.

The child gets cases on stdin and prints one JSON object: the results of each case by its name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import serialize_executable

from tessera.jax.build import build_engine
from tessera.jax.hosts import prepare_devices
from tessera.jax.pipelines import PipelineEngine
from tessera.jax.plans import read_plan
from tests.support.jax_programs import FAST_COMPILATION, ROOT
from tests.support.patience import PATIENCE_S
from tests.support.pipeline_models import a_language_model, some_batches, train_plainly

ITERATIONS = 8
DEVICES = 8


def run_cases(cases: dict[str, dict[str, Any]], **environment: str) -> dict[str, Any]:
    """Return what the child says of each case: see ``_run_case``."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.pipeline_programs"],
        input=json.dumps(cases),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} {FAST_COMPILATION}",
            **environment,
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def a_case(*cuts: int, blocks: int = 2, kind: str = "plain", **more: Any) -> dict[str, Any]:
    """Return a case: stages that end at ``cuts``, and at the last layer.

    ``divisions`` in ``more`` states the degrees of each stage. ``clip_norm`` is optional. If
    ``is_fixed``, programs cannot be moved. The rest are fields of plans.
    """
    ends = (*cuts, blocks + 2)
    degrees = more.pop("divisions", [{}] * len(ends))
    stages = [
        {"start": start, "end": end, **stage}
        for (start, end), stage in zip(pairwise((0, *ends)), degrees, strict=True)
    ]
    clip_norm, is_fixed = more.pop("clip_norm", None), more.pop("is_fixed", False)
    plan = {"stages": stages, "precision": "f32", **more}
    return {
        "blocks": blocks,
        "kind": kind,
        "clip_norm": clip_norm,
        "is_fixed": is_fixed,
        "plan": plan,
    }


def _run_case(
    case: dict[str, Any], events: Counter[str], plain: dict[str, list[float]]
) -> dict[str, Any]:
    """Return the losses under the plan and in plain JAX, and what was compiled for the plan."""
    model, optimizer = a_language_model(case["blocks"], case["kind"]), optax.adamw(1e-2)
    before = Counter(events)
    engine = build_engine(
        model,
        optimizer,
        read_plan(case["plan"]),
        jax.devices(),
        seed=3,
        clip_norm=case["clip_norm"],
    )
    state = engine.initial_state(3)
    start = jax.tree.map(np.array, state.parameters)
    batches = some_batches(ITERATIONS)
    losses = []
    for iteration, words in enumerate(batches):
        with _count_reads() as reads:  # of the last iteration
            state, loss = engine.run_iteration(state, words, words, iteration)
        losses.append(loss)
    results: dict[str, Any] = {"losses": [float(loss) for loss in losses], "reads": len(reads)}
    results["evaluation"] = float(engine.evaluate(state, batches[0], batches[0]))
    results["is_in_place"] = jax.tree.map(_place_of, state) == jax.tree.map(
        _place_of, engine.state_shapes()
    )
    results["events"] = dict(events - before)
    if isinstance(engine, PipelineEngine):
        results["compilations"] = engine.library.compilations
        results["moves"] = engine.library.moves
        results["kept_parameters"] = _count_kept_parameters(engine, state.parameters)
    if case["kind"] != "random":
        key = json.dumps([case["blocks"], case["kind"], case["clip_norm"]])
        if key not in plain:
            clip = case["clip_norm"]
            steps = [optimizer] if clip is None else [optax.clip_by_global_norm(clip), optimizer]
            plain[key] = train_plainly(model, optax.chain(*steps), start, [*batches, batches[0]])
        results["plain"] = plain[key]
    return results


@contextmanager
def _count_reads() -> Iterator[list[Any]]:
    """Note each array that the host reads, which waits for the array to be computed."""
    kind: Any = type(jnp.zeros(()))
    read = kind._value.fget
    arrays: list[Any] = []

    def note(array: Any) -> Any:
        arrays.append(array)
        return read(array)

    with patch.object(kind, "_value", property(note)):
        yield arrays


def _refuse_to_serialize(_: Any) -> Any:
    raise ValueError("this back end cannot serialize programs")


def _place_of(leaf: Any) -> Any:
    return (
        leaf.sharding.spec,
        leaf.sharding.memory_kind or "device",
        leaf.sharding.mesh.devices.size,
    )


def _count_kept_parameters(engine: PipelineEngine, parameters: Any) -> int:
    """Return how many residuals have the shape of a parameter, and none of this model's values do."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(parameters)}
    (flow,) = engine._flows.values()
    kept = [x.forward.out_info[1] for x in flow.programs if x.forward is not None]
    return sum(leaf.shape in shapes for leaf in jax.tree.leaves(kept))


def main() -> None:
    """Run the cases on stdin."""
    prepare_devices()
    events: Counter[str] = Counter()

    def count(event: str, **_: str | int) -> None:
        events[event] += 1

    def count_span(event: str, duration_secs: float, **_: str | int) -> None:
        events[event] += 1

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(count_span)
    plain: dict[str, list[float]] = {}
    cases = json.load(sys.stdin)
    results = {}
    for name, case in cases.items():
        with (
            patch.object(serialize_executable, "serialize", _refuse_to_serialize)
            if case["is_fixed"]
            else nullcontext()
        ):
            results[name] = _run_case(case, events, plain)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
