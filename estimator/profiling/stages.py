"""Profiling of a stage on one device: each kind of layer once, with the shapes on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

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
from tessera.formulation.base.cancellation import never_cancelled


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
