"""Profiling of a stage on one device: each kind of layer once, with the shapes on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from tessera.estimator.graph import Graph, Untraceable
from tessera.estimator.profiling.pieces import Piece, example_inputs, piece_of
from tessera.estimator.profiling.records import ProfileRecord
from tessera.estimator.profiling.timing import (
    RunTiming,
    TimingEffort,
    device_name,
    library_versions,
    time_run,
)
from tessera.estimator.tracing.step import Step, load_step
from tessera.estimator.tracing.trace import TracedStep, trace_program
from tessera.formulation.cancellation import never_cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMaker:
    """A function ``module:function`` that makes steps of a model.

    In addition to ``arguments``, it takes ``samples``, and ``tp`` if the model can be divided within
    a tensor group.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def step(self, samples: int, tp: int = 1) -> Step:
        """Return the step that one GPU computes.

        Raises:
            Untraceable: the function cannot make a step at these sizes.
        """
        given = {**self.arguments, "samples": samples} | ({"tp": tp} if tp > 1 else {})
        return load_step(self.target, given)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The measured times of a whole training step, without and with the update of the weights."""

    samples: int
    passes_s: float
    step_s: float
    method: str
    device_s: float


def profile_stage(
    source: StepMaker,
    samples: int,
    tp: int = 1,
    *,
    date: str,
    start: int = 0,
    end: int | None = None,
    known: Iterable[ProfileRecord] = (),
    effort: TimingEffort | None = None,
    report: Callable[[ProfileRecord], object] = lambda _: None,
    stops: Callable[[], bool] = never_cancelled,
    names: Graph | None = None,
) -> list[ProfileRecord]:
    """Return records of the layers ``start`` to ``end`` that are not in ``known``, one per kind.

    Kinds are named as in ``kinds_of(source)`` for all ``samples`` and ``tp``, so that records serve
    all Cells of a job. ``names`` is that graph. Callers that measure several sizes pass it, so that
    it is traced once. ``report`` is called with each record as it is measured. ``stops`` is called
    before each record; once it returns true, the records so far are returned. ``date`` is
    provenance. ``device_s`` counts the time from compilation to the last run, during which the
    device is held.

    Raises:
        Untraceable: the step cannot be traced at these sizes.
    """
    effort = effort or TimingEffort()
    names = kinds_of(source) if names is None else names
    here = trace_program(source.step(samples, tp))
    _check_alike(names, here.graph, samples, tp)
    measured = {record.key for record in known}
    records = []
    for layer in range(len(names))[start:end]:
        kind, dtype = names.kind[layer], names.dtype
        if (kind, float(samples), tp, dtype) in measured:
            continue
        if stops():
            break
        record = _record(here, layer, effort, kind=kind, samples=samples, tp=tp, date=date)
        measured.add(record.key)
        records.append(record)
        report(record)
    return records


def kinds_of(source: StepMaker) -> Graph:
    """Return the graph at one sample, whose kinds name the records."""
    return trace_program(source.step(1)).graph


def _check_alike(names: Graph, here: Graph, samples: int, tp: int) -> None:
    """Check that a step has the same layers at other sizes.

    Raises:
        Untraceable: the layers differ, or two layers are alike at one size and not at the other.
    """
    alike = [[kinds.index(kind) for kind in kinds] for kinds in (names.kind, here.kind)]
    if alike[0] != alike[1]:
        raise Untraceable(
            f"{names.name} has different layers with {samples} samples and tp {tp} than with one sample;"
            " make its operators independent of these sizes"
        )


def _record(
    here: TracedStep,
    layer: int,
    effort: TimingEffort,
    *,
    kind: str,
    samples: int,
    tp: int,
    date: str,
) -> ProfileRecord:
    begun = effort.clock()
    forward, both = _time_piece(piece_of(here, layer), effort)
    return ProfileRecord(
        kind=kind,
        samples=samples,
        tp=tp,
        dtype=here.graph.dtype,
        forward_s=forward.run_s,
        backward_s=max(0.0, both.run_s - forward.run_s),
        method=both.method,
        repeats=effort.repeats,
        device_s=effort.clock() - begun,
        device=device_name(),
        versions=library_versions(),
        date=date,
    )


def _time_piece(piece: Piece, effort: TimingEffort) -> tuple[RunTiming, RunTiming]:
    """Return the timings of the forward pass, and of forward and backward together."""
    floats = example_inputs(piece.floats, piece.largest_index)
    others = example_inputs(piece.others, piece.largest_index, seed=1)
    return (
        _time_function(piece.run, (floats, others), effort),
        _time_function(piece.with_backward, (floats, others), effort),
    )


def _time_function(
    function: Callable[..., Any], inputs: tuple[Any, ...], effort: TimingEffort
) -> RunTiming:
    compiled = jax.jit(function).lower(*inputs).compile()
    return time_run(lambda: compiled(*inputs), effort)


def measure_step(step: Step, *, effort: TimingEffort | None = None) -> StepTimes:
    """Return the time of a whole training step on one device: gradients of the loss, then Adam."""
    effort = effort or TimingEffort()
    begun = effort.clock()
    params, batch = _arrays(step)
    moments = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    def passes(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(step.loss)(params, batch)

    def whole(params: Any, first: Any, second: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(step.loss)(params, batch)
        return loss, *_adam(params, first, second, gradients)

    alone = _time_function(passes, (params, batch), effort)
    full = _time_function(whole, (params, moments, moments, batch), effort)
    return StepTimes(
        samples=step.samples,
        passes_s=alone.run_s,
        step_s=full.run_s,
        method=full.method,
        device_s=effort.clock() - begun,
    )


def measure_update(step: Step, *, effort: TimingEffort | None = None) -> float:
    """Return the seconds of Adam alone on a step's parameters."""
    params, _ = _arrays(step)
    moments = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return _time_function(_adam, (params, moments, moments, params), effort or TimingEffort()).run_s


def _adam(params: Any, first: Any, second: Any, gradients: Any) -> Any:
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(jnp.float32), first, gradients)
    second = jax.tree.map(
        lambda v, g: 0.95 * v + 0.05 * jnp.square(g.astype(jnp.float32)), second, gradients
    )
    params = jax.tree.map(
        lambda p, m, v: (p - 1e-4 * m * jax.lax.rsqrt(v + 1e-8)).astype(p.dtype),
        params,
        first,
        second,
    )
    return params, first, second


def _arrays(step: Step) -> tuple[Any, Any]:
    """Return parameters and a batch for a run of a step. Integers of the batch are 0 or 1."""

    def filled(tree: Any, seed: int) -> Any:
        leaves, shape = jax.tree.flatten(tree)
        return jax.tree.unflatten(shape, example_inputs(leaves, below=2, seed=seed))

    return filled(step.params, 0), filled(step.batch, 1)


def total_s(graph: Graph, records: Iterable[ProfileRecord], samples: int, tp: int = 1) -> float:
    """Return the forward and backward seconds of all layers of a graph, from records alone.

    Raises:
        KeyError: a layer was not profiled.
    """
    seconds = {record.key: record.forward_s + record.backward_s for record in records}
    return sum(seconds[kind, float(samples), tp, graph.dtype] for kind in graph.kind)
