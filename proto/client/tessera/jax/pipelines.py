"""Plans of several stages: programs of stages on one host, started by one controller.

The controller only starts programs and copies between devices. Both run later, in the order in
which they were started, so nothing within an iteration waits for a device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tessera.jax.compiled import ProgramLibrary
from tessera.jax.engines import TrainState
from tessera.jax.errors import PlanRefused
from tessera.jax.flows import Flow, Iteration, micro_shapes, place_values
from tessera.jax.layouts import StageLayout, stage_layouts
from tessera.jax.models import Model, Params, Values
from tessera.jax.optimizers import fetch, place_shapes, shardings_of
from tessera.jax.passes import Draws, Pass, trace_layers
from tessera.jax.schedules import merge_lanes, order_lanes
from tessera.jax.stageprograms import (
    Split,
    StageTrace,
    compile_evaluation,
    compile_stage,
)
from tessera.jax.updates import (
    PipelineUpdate,
    StageState,
    compile_start,
    lay_state,
    send_back,
)
from tessera.plans import ExecutionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage's part of the model, and its place."""

    state: StageState
    function: Pass
    key: Hashable
    numbers: jax.Array
    """The places of the layers in the model, on the stage's devices."""
    is_random: bool

    @property
    def layout(self) -> StageLayout:
        """Return the layout."""
        return self.state.layout

    def parameters(self, state: TrainState) -> tuple[Params, ...]:
        """Return the parameters of the stage's layers, in the memory of its devices."""
        own = tuple(state.parameters[layer.name] for layer in self.state.layers)
        fetched: tuple[Params, ...] = fetch(own, self.state.parameters)
        return fetched


class PipelineEngine:
    """An engine for plans with several stages on this host's devices.

    All programs are compiled for the shapes of the first batch. A batch of other shapes gets its own.
    """

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        plan: ExecutionPlan,
        devices: Sequence[jax.Device],
        *,
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        if len({device.process_index for device in devices[: plan.gpus]}) > 1:
            raise PlanRefused(
                "the plan's stages are on several hosts, but pipelines run on one host; use a plan"
                " with one stage, or with stages that fit one host"
            )
        self._model, self._optimizer, self._plan, self._seed = model, optimizer, plan, seed
        self._clip_norm = clip_norm
        self.library = ProgramLibrary()
        layouts = stage_layouts(plan, devices, model.sequence_axis)
        shapes = model.parameter_shapes()
        self._stages = tuple(self._make_stage(layout, shapes) for layout in layouts)
        firsts = np.arange(plan.accumulation, dtype=np.uint32) * np.uint32(plan.micro_batch)
        self._first_samples = {
            place: tuple(jax.device_put(first, place) for first in firsts)
            for place in {x.layout.whole() for x in self._stages if x.is_random}
        }
        lanes = order_lanes(plan.schedule, plan.pipeline_degree, plan.chunks, plan.accumulation)
        self._order = merge_lanes(lanes)
        self._flows: dict[Hashable, Flow] = {}

    @cached_property
    def _updates(self) -> PipelineUpdate:
        """Return the programs that do not depend on the batch, compiled when they are needed."""
        states = [stage.state for stage in self._stages]
        return PipelineUpdate(states, self._optimizer, self._clip_norm, self.library)

    @property
    def plan(self) -> ExecutionPlan:
        """Return the plan."""
        return self._plan

    def initial_state(self, seed: int) -> TrainState:
        """Return the state before the first iteration, in its place. It is the same for every plan."""
        numbers, parts = np.arange(self._plan.layers, dtype=np.uint32), []
        for stage in self._stages:
            begin, whole = stage.layout.stage.start, stage.layout.whole()
            for place in range(len(stage.state.layers)):
                start = compile_start(stage.state, place, self._optimizer, self.library)
                sent = jax.device_put((np.uint32(seed), numbers[begin + place]), whole)
                parts.append(
                    send_back(
                        start(*sent), (stage.state.parameters[place], stage.state.optimizer[place])
                    )
                )
        names = [layer.name for layer in self._model.layers]
        return TrainState(
            {name: own for name, (own, _) in zip(names, parts, strict=True)},
            {name: kept for name, (_, kept) in zip(names, parts, strict=True)},
        )

    def state_shapes(self) -> TrainState:
        """Return the state as ``jax.ShapeDtypeStruct`` with shardings, onto which it is restored."""
        return self._name([(x.state.parameters, x.state.optimizer) for x in self._stages])

    def run_iteration(
        self, state: TrainState, inputs: Values, targets: Values, iteration: int
    ) -> tuple[TrainState, jax.Array]:
        """Train an iteration. Return the new state and the mean loss, a float32 scalar.

        The old state must not be used again.
        """
        flow = self._flow(inputs, targets)
        parameters = [stage.parameters(state) for stage in self._stages]
        run = Iteration(
            flow=flow,
            parameters=self._updates.prepare(parameters),
            sums=[programs.zeros() for programs in flow.programs],
        )
        iterations = self._send_iteration(iteration)
        for stage, micro_batch, is_backward in self._order:
            draws = self._draws(stage, iterations, micro_batch)
            if is_backward:
                run.start_backward(stage, micro_batch, draws, targets)
            else:
                run.start_forward(stage, micro_batch, draws, inputs)
        *sums, (last_sums, loss) = run.sums
        parts = self._updates.run(state, parameters, [*sums, last_sums])
        return self._name(parts), loss

    def evaluate(self, state: TrainState, inputs: Values, targets: Values) -> jax.Array:
        """Return the mean loss of a global batch without training, a float32 scalar."""
        flow = self._flow(inputs, targets)
        if not flow.evaluations:
            flow.evaluations.extend(compile_evaluation(x, self.library) for x in flow.traces)
        parameters = self._updates.prepare([stage.parameters(state) for stage in self._stages])
        loss: jax.Array = flow.programs[-1].zeros()[1]
        for micro_batch in range(self._plan.accumulation):
            values = flow.take(inputs, micro_batch, flow.values[0])
            for stage, program in enumerate(flow.evaluations[:-1]):
                results = program(parameters[stage], values, None)
                values = jax.device_put(results, flow.values[stage + 1])
            own_targets = flow.take(targets, micro_batch, flow.targets)
            loss = flow.evaluations[-1](parameters[-1], values, None, own_targets, loss)
        return loss

    def _make_stage(self, layout: StageLayout, shapes: dict[str, Params]) -> _Stage:
        stated = layout.stage
        layers = self._model.layers[stated.start : stated.end]
        state = lay_state(layers, layout, shapes, self._optimizer, self._plan)
        numbers = np.arange(stated.start, stated.end, dtype=np.uint32)
        plan = self._plan
        return _Stage(
            state=state,
            function=trace_layers(layers, layout, plan, self._seed),
            key=(state.key, plan.recomputation, plan.precision, plan.micro_batch),
            numbers=jax.device_put(numbers, layout.whole()),
            is_random=any(layer.is_random for layer in layers),
        )

    def _flow(self, inputs: Values, targets: Values) -> Flow:
        """Return the programs for batches of this shape, which are compiled the first time."""
        leaves, structure = jax.tree.flatten((inputs, targets))
        key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = self._make_flow(inputs, targets)
        return flow

    def _make_flow(self, inputs: Values, targets: Values) -> Flow:
        samples = jax.tree.leaves(inputs)[0].shape[0]
        if samples != self._plan.global_batch:
            raise PlanRefused(
                f"the batch has {samples} samples, but the plan's iterations have"
                f" {self._plan.global_batch}; give whole global batches"
            )
        first, last = self._stages[0].layout, self._stages[-1].layout
        shapes = micro_shapes(inputs, self._plan.micro_batch)
        goals = micro_shapes(targets, self._plan.micro_batch)
        arriving = place_shapes(shapes, first.values(shapes))
        goals = place_shapes(goals, jax.tree.map(lambda _: last.samples(), goals))
        traces: list[StageTrace] = []
        for index in range(len(self._stages)):
            trace, arriving = self._trace(index, arriving, goals)
            traces.append(trace)
        return Flow(
            traces=tuple(traces),
            programs=tuple(compile_stage(trace, self.library) for trace in traces),
            evaluations=[],
            values=tuple(shardings_of(trace.values) for trace in traces),
            gradients=tuple(
                shardings_of(Split.of(trace.results).smooth(trace.results)) for trace in traces[:-1]
            ),
            targets=shardings_of(goals),
            samples=self._plan.micro_batch,
        )

    def _trace(self, index: int, values: Values, targets: Values) -> tuple[StageTrace, Values]:
        """Return a stage's trace, and the shapes of values as they reach the next stage."""
        stage = self._stages[index]
        after = self._stages[index + 1] if index + 1 < len(self._stages) else None
        draws = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self._draws(index, self._send_iteration(0), 0),
        )
        results: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=stage.layout.whole())
        arriving: Values = ()
        if after is not None:
            shapes = jax.eval_shape(stage.function, stage.state.computing(), values, draws)
            leaving_places, arriving_places = place_values(stage.layout, after.layout, shapes)
            results = place_shapes(shapes, leaving_places)
            arriving = place_shapes(shapes, arriving_places)
        trace = StageTrace(
            key=stage.key,
            function=stage.function,
            layout=stage.layout,
            parameters=stage.state.computing(),
            sums=stage.state.sums,
            draws=draws,
            values=values,
            results=results,
            is_first=index == 0,
            loss=self._model.loss if after is None else None,
            targets=targets if after is None else (),
            parts=self._plan.accumulation,
        )
        return trace, arriving

    def _send_iteration(self, iteration: int) -> dict[Any, jax.Array]:
        """Return the number of the iteration on the devices of each stage with random layers."""
        number = np.uint32(iteration)
        places = {x.layout.whole() for x in self._stages if x.is_random}
        return {place: jax.device_put(number, place) for place in places}

    def _draws(
        self, index: int, iterations: dict[Any, jax.Array], micro_batch: int
    ) -> Draws | None:
        """Return what random numbers of a micro-batch depend on, on the stage's devices."""
        stage = self._stages[index]
        if not stage.is_random:
            return None
        place = stage.layout.whole()
        return Draws(iterations[place], self._first_samples[place][micro_batch], stage.numbers)

    def _name(self, parts: Sequence[tuple[Any, Any]]) -> TrainState:
        """Return the parameters and optimizer states of all stages by names of layers."""
        named = TrainState({}, {})
        for stage, (own, kept) in zip(self._stages, parts, strict=True):
            names = [layer.name for layer in stage.state.layers]
            named.parameters.update(zip(names, own, strict=True))
            named.optimizer.update(zip(names, kept, strict=True))
        return named
