"""The graph of layers of a step. ``trace_program`` also returns the program."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.estimator.graph import Graph
from tessera.estimator.programs.flow import Flow
from tessera.estimator.programs.layers import divide_into_layers
from tessera.estimator.tracing.forward import program_of
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
    )
