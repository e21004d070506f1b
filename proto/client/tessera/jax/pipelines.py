"""Plans of several stages: programs of stages on one host, started by one controller.

The controller only starts programs and copies between devices. Both run later, in the order in
which they were started, so nothing within an iteration waits for a device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tessera.jax.compiled import Program, ProgramLibrary
from tessera.jax.engines import TrainState
from tessera.jax.errors import PlanRefused
from tessera.jax.flows import micro_shapes, place_values, with_places
from tessera.jax.layouts import StageLayout, stage_layouts
from tessera.jax.localpasses import trace_layers
from tessera.jax.models import Model, Params, Values
from tessera.jax.plans import Plan
from tessera.jax.schedules import merge_lanes, order_lanes
from tessera.jax.stageprograms import (
    Split,
    StageFunction,
    StagePrograms,
    StageTrace,
    compile_evaluation,
    compile_stage,
    shardings_of,
)
from tessera.jax.updates import (
    StageState,
    compile_factor,
    compile_squares,
    compile_start,
    compile_update,
    lay_state,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage's part of the model, its state, and the programs that do not depend on the batch."""

    state: StageState
    function: StageFunction
    key: Hashable
    numbers: jax.Array
    """The places of the layers in the model, on the stage's devices."""
    is_random: bool
    update: Program
    squares: Program | None

    @property
    def layout(self) -> StageLayout:
        """Return the layout."""
        return self.state.layout

    def own(self, by_name: dict[str, Any]) -> tuple[Any, ...]:
        """Return what belongs to this stage's layers, in their order."""
        return tuple(by_name[layer.name] for layer in self.state.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """All stages for one shape of micro-batches."""

    traces: tuple[StageTrace, ...]
    programs: tuple[StagePrograms, ...]
    evaluations: list[Program]
    """The programs of ``evaluate``, compiled when they are first needed."""
    values: tuple[Any, ...]
    """Where the values of each stage go."""
    gradients: tuple[Any, ...]
    """Where the gradients of each stage's results go. The last stage has none."""
    targets: Any
    """Where targets go."""


class PipelineEngine:
    """An engine for plans with several stages on this host's devices."""

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        devices: Sequence[jax.Device],
        *,
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        if plan.offload != "none":
            raise PlanRefused(
                "pipelines keep everything on their devices; use a plan with the offload 'none'"
            )
        self._model, self._optimizer, self._plan, self._seed = model, optimizer, plan, seed
        self.library = ProgramLibrary()
        layouts = stage_layouts(plan, devices, model.sequence_axis)
        shapes = model.parameter_shapes()
        self._stages = tuple(
            self._make_stage(index, layout, shapes, is_clipped=clip_norm is not None)
            for index, layout in enumerate(layouts)
        )
        firsts = np.arange(plan.accumulation, dtype=np.uint32) * np.uint32(plan.micro_batch)
        self._first_samples = {
            place: tuple(jax.device_put(first, place) for first in firsts)
            for place in {x.layout.whole() for x in self._stages if x.is_random}
        }
        lanes = order_lanes(plan.schedule, plan.degree, plan.chunks, plan.accumulation)
        self._order = merge_lanes(lanes)
        self._flows: dict[Hashable, _Flow] = {}
        self._factor = (
            None
            if clip_norm is None
            else compile_factor(len(layouts), clip_norm, layouts[0], self.library)
        )

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        return self._plan

    def initial_state(self, seed: int) -> TrainState:
        """Return the state before the first iteration, in its place. It is the same for every plan."""
        numbers, named = np.arange(self._plan.layers, dtype=np.uint32), TrainState({}, {})
        for stage in self._stages:
            whole = stage.layout.whole()
            for place, layer in enumerate(stage.state.layers):
                start = compile_start(stage.state, place, self._optimizer, self.library)
                number = numbers[stage.layout.stage.start + place]
                own, kept = start(*jax.device_put((np.uint32(seed), number), whole))
                named.parameters[layer.name], named.optimizer[layer.name] = own, kept
        return named

    def state_shapes(self) -> TrainState:
        """Return the state as ``jax.ShapeDtypeStruct`` with shardings, onto which it is restored."""
        states = [stage.state for stage in self._stages]
        return self._name([x.parameters for x in states], [x.optimizer for x in states])

    def run_iteration(
        self, state: TrainState, inputs: Values, targets: Values, iteration: int
    ) -> tuple[TrainState, jax.Array]:
        """Train an iteration. Return the new state and the mean loss, a float32 scalar.

        The old state must not be used again.
        """
        flow = self._flow(inputs, targets)
        parameters = [stage.own(state.parameters) for stage in self._stages]
        sums = [programs.zeros() for programs in flow.programs]
        iterations = self._send_iteration(iteration)
        values: dict[tuple[int, int], Any] = {}
        residuals: dict[tuple[int, int], Any] = {}
        gradients: dict[tuple[int, int], Any] = {}
        for stage, micro_batch, is_backward in self._order:
            programs, own = flow.programs[stage], parameters[stage]
            place = (stage, micro_batch)
            if not is_backward:
                if not stage:
                    values[place] = self._take(inputs, micro_batch, flow.values[0])
                if programs.forward is None:
                    continue
                draws = self._draws(self._stages[stage], iterations, micro_batch)
                results, residuals[place] = programs.forward(own, values[place], draws)
                values[stage + 1, micro_batch] = jax.device_put(results, flow.values[stage + 1])
                if not programs.keeps_values:
                    del values[place]
                continue
            if programs.forward is None:
                draws = self._draws(self._stages[stage], iterations, micro_batch)
                given = (
                    own,
                    values.pop(place),
                    draws,
                    self._take(targets, micro_batch, flow.targets),
                )
            else:
                given = (residuals.pop(place), own, values.pop(place, ()), gradients.pop(place))
            sums[stage], of_values = programs.backward(sums[stage], *given)
            if stage:
                to = flow.gradients[stage - 1]
                gradients[stage - 1, micro_batch] = jax.device_put(of_values, to)
        sums[-1], loss = sums[-1]
        return self._update(state, parameters, sums), loss

    def evaluate(self, state: TrainState, inputs: Values, targets: Values) -> jax.Array:
        """Return the mean loss of a global batch without training, a float32 scalar."""
        flow = self._flow(inputs, targets)
        if not flow.evaluations:
            flow.evaluations.extend(compile_evaluation(x, self.library) for x in flow.traces)
        parameters = [stage.own(state.parameters) for stage in self._stages]
        loss: jax.Array = flow.programs[-1].zeros()[1]
        for micro_batch in range(self._plan.accumulation):
            values = self._take(inputs, micro_batch, flow.values[0])
            for stage, program in enumerate(flow.evaluations[:-1]):
                results = program(parameters[stage], values, ())
                values = jax.device_put(results, flow.values[stage + 1])
            own_targets = self._take(targets, micro_batch, flow.targets)
            loss = flow.evaluations[-1](parameters[-1], values, (), own_targets, loss)
        return loss

    def _make_stage(
        self, index: int, layout: StageLayout, shapes: dict[str, Params], *, is_clipped: bool
    ) -> _Stage:
        stated = layout.stage
        layers = self._model.layers[stated.start : stated.end]
        state = lay_state(layers, layout, shapes, self._optimizer)
        numbers = np.arange(stated.start, stated.end, dtype=np.uint32)
        plan = self._plan
        return _Stage(
            state=state,
            function=trace_layers(layers, layout, plan, self._seed),
            key=(
                state.key,
                (stated.dp, stated.tp, stated.ep, stated.sp),
                (plan.zero, plan.recomputation, plan.precision, plan.micro_batch),
            ),
            numbers=jax.device_put(numbers, layout.whole()),
            is_random=any(layer.is_random for layer in layers),
            update=compile_update(state, self._optimizer, self.library, is_clipped=is_clipped),
            squares=compile_squares(state, self.library) if is_clipped else None,
        )

    def _flow(self, inputs: Values, targets: Values) -> _Flow:
        """Return the programs for batches of this shape, which are compiled the first time."""
        leaves, structure = jax.tree.flatten((inputs, targets))
        key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = self._make_flow(inputs, targets)
        return flow

    def _make_flow(self, inputs: Values, targets: Values) -> _Flow:
        samples = jax.tree.leaves(inputs)[0].shape[0]
        if samples != self._plan.global_batch:
            raise PlanRefused(
                f"the batch has {samples} samples, but the plan's iterations have"
                f" {self._plan.global_batch}; give whole global batches"
            )
        first, last = self._stages[0].layout, self._stages[-1].layout
        shapes = micro_shapes(inputs, self._plan.micro_batch)
        arriving = with_places(shapes, first.values(shapes))
        goals = micro_shapes(targets, self._plan.micro_batch)
        goals = with_places(goals, jax.tree.map(lambda _: last.samples(), goals))
        traces: list[StageTrace] = []
        for stage, after in zip(self._stages, (*self._stages[1:], None), strict=True):
            trace, arriving = self._trace(stage, after, arriving, goals)
            traces.append(trace)
        return _Flow(
            traces=tuple(traces),
            programs=tuple(compile_stage(trace, self.library) for trace in traces),
            evaluations=[],
            values=tuple(shardings_of(trace.values) for trace in traces),
            gradients=tuple(
                shardings_of(Split.of(trace.results).smooth(trace.results)) for trace in traces[:-1]
            ),
            targets=shardings_of(goals),
        )

    def _trace(
        self, stage: _Stage, after: _Stage | None, values: Values, targets: Values
    ) -> tuple[StageTrace, Values]:
        """Return a stage's trace, and the shapes of values as they reach the next stage."""
        draws = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self._draws(stage, self._send_iteration(0), 0),
        )
        results: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=stage.layout.whole())
        arriving: Values = ()
        if after is not None:
            shapes = jax.eval_shape(stage.function, stage.state.parameters, values, draws)
            leaving_places, arriving_places = place_values(stage.layout, after.layout, shapes)
            results = with_places(shapes, leaving_places)
            arriving = with_places(shapes, arriving_places)
        trace = StageTrace(
            key=stage.key,
            function=stage.function,
            layout=stage.layout,
            parameters=stage.state.parameters,
            sums=stage.state.sums,
            draws=draws,
            values=values,
            results=results,
            is_first=stage is self._stages[0],
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

    def _draws(self, stage: _Stage, iterations: dict[Any, jax.Array], micro_batch: int) -> Any:
        """Return what random numbers of a micro-batch depend on, on the stage's devices."""
        if not stage.is_random:
            return ()
        place = stage.layout.whole()
        return iterations[place], self._first_samples[place][micro_batch], stage.numbers

    def _name(self, parameters: Sequence[Any], states: Sequence[Any]) -> TrainState:
        """Return the state of all stages by names of layers."""
        named = TrainState({}, {})
        for stage, own, kept in zip(self._stages, parameters, states, strict=True):
            names = [layer.name for layer in stage.state.layers]
            named.parameters.update(zip(names, own, strict=True))
            named.optimizer.update(zip(names, kept, strict=True))
        return named

    def _take(self, batch: Values, micro_batch: int, places: Any) -> Values:
        """Return a micro-batch of the global batch, on its way to its places."""
        size = self._plan.micro_batch
        begin = micro_batch * size
        return jax.device_put(jax.tree.map(lambda leaf: leaf[begin : begin + size], batch), places)

    def _update(
        self, state: TrainState, parameters: Sequence[Any], sums: Sequence[Any]
    ) -> TrainState:
        factors: list[tuple[jax.Array, ...]] = [() for _ in self._stages]
        if self._factor is not None:
            first = self._stages[0].layout.whole()
            squares = [
                jax.device_put(stage.squares(own), first)
                for stage, own in zip(self._stages, sums, strict=True)
                if stage.squares is not None
            ]
            factor = self._factor(tuple(squares))
            factors = [(jax.device_put(factor, x.layout.whole()),) for x in self._stages]
        parts = [
            stage.update(own, stage.own(state.optimizer), total, *given)
            for stage, own, total, given in zip(
                self._stages, parameters, sums, factors, strict=True
            )
        ]
        return self._name([own for own, _ in parts], [kept for _, kept in parts])
