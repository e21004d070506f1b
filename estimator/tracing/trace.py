"""The graph of layers of a step. ``trace_program`` also returns the program."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.estimator.graph import Graph
from tessera.estimator.programs.flow import Flow
from tessera.estimator.programs.layers import divide_into_layers
from tessera.estimator.programs.parallel import Division
from tessera.estimator.tracing.forward import parameter_order, program_of
from tessera.estimator.tracing.program import JaxProgram
from tessera.estimator.tracing.step import Step, load_step


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step's graph with its program. ``ends`` are the ends of layers as positions in
    ``flow.active``."""

    step: Step
    program: JaxProgram
    graph: Graph
    flow: Flow
    ends: tuple[int, ...]
    division: Division


def graph_of_step(step: Step | str) -> Graph:
    """Return the graph of a step, or of the step that ``module:function`` makes.

    Amounts are divided by the samples of the step's batch.

    Raises:
        Untraceable: the step cannot be traced; the message says why and what to do.
    """
    return trace_program(step).graph


def trace_program(step: Step | str) -> TracedStep:
    """Return the graph with the program from which it is made.

    Raises:
        Untraceable: as in :func:`graph_of_step`.
    """
    step = load_step(step) if isinstance(step, str) else step
    samples = step.samples
    program = program_of(step)
    made = divide_into_layers(step.name, program, samples)
    return TracedStep(
        step=step,
        program=program,
        graph=made.graph,
        flow=made.flow,
        ends=made.ends,
        division=made.division,
    )


def parameter_axes(result: TracedStep) -> dict[int, tuple[str, int]]:
    """Return the division of each leaf of the step's parameters: ``("tensor" or "expert", axis)``.

    Leaves that are not divided, or whose axis cannot be followed back to the leaf, are absent.
    """
    program, flow = result.flow.program, result.flow
    leaf = dict(zip(program.parameters, parameter_order(result.step.params), strict=True))
    origin = {
        op.writes[0]: next(iter(flow.sources[op.reads[0]]))
        for op in program.operators
        if op.name == "slice_of" and flow.sources.get(op.writes[0]) == frozenset(op.writes)
    }
    by_leaf: dict[int, tuple[str, int]] = {}
    for how, axes in (
        ("tensor", result.division.weight_axis),
        ("expert", result.division.expert_axis),
    ):
        for value, axis in axes.items():
            for source in flow.sources[value]:
                if program.shape(source) != program.shape(value):
                    continue
                parameter, place = (
                    (origin[source], axis + 1) if source in origin else (source, axis)
                )
                by_leaf.setdefault(leaf[parameter], (how, place))
    return by_leaf
