"""The programs of a pipeline's stage: forward, backward, and the update of its parameters.

Inside programs, layers have places and no names, so that equal stages share programs. The forward
program returns what its backward program needs (the residuals). Parameters and values that are
needed unchanged are not among them: the backward program gets the stage's own, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from tessera.jax.compiled import Program, ProgramLibrary
from tessera.jax.layouts import StageLayout
from tessera.jax.models import Params, Values
from tessera.jax.optimizers import shardings_of
from tessera.jax.passes import Draws, Pass, mean_loss

Leaves: TypeAlias = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Which leaves of a tree have gradients, i.e. are floating-point."""

    structure: Any
    has_gradient: tuple[bool, ...]

    @classmethod
    def of(cls, tree: Values, *, is_fixed: bool = False) -> Split:
        """Return the split of a tree. If ``is_fixed``, no leaf has a gradient."""
        leaves, structure = jax.tree.flatten(tree)
        kinds = tuple(not is_fixed and jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves)
        return cls(structure, kinds)

    def smooth(self, tree: Values) -> tuple[Any, ...]:
        """Return the leaves that have gradients."""
        leaves = jax.tree.leaves(tree)
        return tuple(x for x, smooth in zip(leaves, self.has_gradient, strict=True) if smooth)

    def rest(self, tree: Values) -> tuple[Any, ...]:
        """Return the leaves that have none."""
        leaves = jax.tree.leaves(tree)
        return tuple(x for x, smooth in zip(leaves, self.has_gradient, strict=True) if not smooth)

    def join(self, smooth: Sequence[Any], rest: Sequence[Any]) -> Values:
        """Return the tree of both."""
        first, second = iter(smooth), iter(rest)
        leaves = [next(first) if is_smooth else next(second) for is_smooth in self.has_gradient]
        return jax.tree.unflatten(self.structure, leaves)


@dataclass(slots=True)
class Recipe:
    """How to build a vjp function: from residuals, and from the stage's parameters and values."""

    structure: Any = None
    sources: list[tuple[bool, int]] = field(default_factory=list)
    """For each leaf: whether it is a residual, and its place there or among the stage's arrays."""

    def take(self, vjp: Any, own: Any) -> Leaves:
        """Return the residuals of a vjp function, and note how to build it again."""
        leaves, self.structure = jax.tree.flatten(vjp)
        places = {id(leaf): (False, index) for index, leaf in enumerate(jax.tree.leaves(own))}
        residuals: list[jax.Array] = []
        self.sources = []
        for leaf in leaves:
            if id(leaf) not in places:
                places[id(leaf)] = (True, len(residuals))
                residuals.append(leaf)
            self.sources.append(places[id(leaf)])
        return tuple(residuals)

    def build(self, residuals: Leaves, own: Any) -> Any:
        """Return the vjp function."""
        arrays = jax.tree.leaves(own)
        leaves = [residuals[i] if is_residual else arrays[i] for is_residual, i in self.sources]
        return jax.tree.unflatten(self.structure, leaves)

    def needs_values(self, parameters: int) -> bool:
        """Return whether the vjp function needs values, which come after ``parameters`` arrays."""
        return any(not is_residual and index >= parameters for is_residual, index in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTrace:
    """A stage as the makers of its programs see it.

    ``key`` is equal for stages whose functions are equal. ``values`` and ``results`` are shapes with
    the shardings in which values come and go. ``loss`` is None but for the last stage, whose
    results are a scalar, and whose ``targets`` are shapes with shardings.
    """

    key: Hashable
    function: Pass
    layout: StageLayout
    parameters: tuple[Params, ...]
    sums: tuple[Params, ...]
    draws: Draws | None
    values: Values
    results: Values
    is_first: bool
    loss: Callable[[Values, Values], jax.Array] | None = None
    targets: Values = ()
    parts: int = 1
    """The number of micro-batches of an iteration, by which the loss is divided."""

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Return the devices in the order of the mesh."""
        return tuple(self.layout.mesh.devices.flat)

    def split(self) -> Split:
        """Return which of the stage's values have gradients. Those of the first stage have none."""
        return Split.of(self.values, is_fixed=self.is_first)

    def measure_loss(
        self, parameters: Any, values: Values, draws: Draws | None, targets: Values
    ) -> jax.Array:
        """Return the last stage's part of the loss of an iteration, in float32."""
        if self.loss is None:
            raise TypeError("only the last stage has a loss")
        results = self.function(parameters, values, draws)
        return mean_loss(self.loss, results, targets) / self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrograms:
    """The compiled programs of a stage for one shape of micro-batches.

    * ``zeros() -> sums``, before the first micro-batch;
    * ``forward(parameters, values, draws) -> (results, residuals)``;
    * ``backward(sums, residuals, parameters, values, gradients) -> (sums, gradients)``.

    The last stage has no forward program, because its backward pass does both. Its sums have the
    loss as a second part:
    ``backward(sums, parameters, values, draws, targets) -> (sums, gradients)``.
    """

    zeros: Program
    forward: Program | None
    backward: Program
    keeps_values: bool
    """Whether the backward program needs the stage's values."""


def compile_stage(trace: StageTrace, library: ProgramLibrary) -> StagePrograms:
    """Compile the programs of a stage, or load those of a stage that is alike."""
    zeros = _compile_zeros(trace, library)
    if trace.loss is not None:
        backward = _compile_last(trace, library)
        return StagePrograms(zeros=zeros, forward=None, backward=backward, keeps_values=True)
    forward, recipe = _compile_forward(trace, library)
    return StagePrograms(
        zeros=zeros,
        forward=forward,
        backward=_compile_backward(trace, library, forward, recipe),
        keeps_values=recipe.needs_values(len(jax.tree.leaves(trace.parameters))),
    )


def compile_evaluation(trace: StageTrace, library: ProgramLibrary) -> Program:
    """Return a stage's forward program without residuals.

    The last stage's is ``forward(parameters, values, draws, targets, loss) -> loss``, which adds.
    """

    def run_middle(parameters: Any, values: Values, draws: Draws | None) -> Values:
        return trace.function(parameters, values, draws)

    def run_last(
        parameters: Any, values: Values, draws: Draws | None, targets: Values, total: jax.Array
    ) -> jax.Array:
        return total + trace.measure_loss(parameters, values, draws, targets)

    arguments = (trace.parameters, trace.values, None)
    return library.compile(
        ("evaluation", trace.key, trace.loss, trace.parts),
        run_middle if trace.loss is None else run_last,
        arguments if trace.loss is None else (*arguments, trace.targets, trace.results),
        trace.devices,
        outputs=shardings_of(trace.results),
    )[0]


def _compile_zeros(trace: StageTrace, library: ProgramLibrary) -> Program:
    shapes = trace.sums if trace.loss is None else (trace.sums, trace.results)

    def make_zeros() -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    key = ("zeros", jax.tree.structure(shapes), tuple(x.shape for x in jax.tree.leaves(shapes)))
    outputs = shardings_of(shapes)
    return library.compile(key, make_zeros, (), trace.devices, outputs=outputs)[0]


def _compile_forward(trace: StageTrace, library: ProgramLibrary) -> tuple[Program, Recipe]:
    """Return the forward program, and how to build its vjp function."""
    split, kinds, recipe = trace.split(), Split.of(trace.results), Recipe()

    def run_forward(parameters: Any, values: Values, draws: Draws | None) -> tuple[Values, Leaves]:
        def run(own: Any, smooth: Any) -> tuple[Any, Any]:
            results = trace.function(own, split.join(smooth, split.rest(values)), draws)
            return kinds.smooth(results), kinds.rest(results)

        smooth, vjp, rest = jax.vjp(run, parameters, split.smooth(values), has_aux=True)
        return kinds.join(smooth, rest), recipe.take(vjp, (parameters, values))

    return library.compile(
        ("forward", trace.key, trace.is_first),
        run_forward,
        (trace.parameters, trace.values, trace.draws),
        trace.devices,
        outputs=(shardings_of(trace.results), None),
        note=lambda: recipe,
    )


def _compile_backward(
    trace: StageTrace, library: ProgramLibrary, forward: Program, recipe: Recipe
) -> Program:
    residuals = jax.tree.map(
        lambda info, place: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=place),
        forward.out_info[1],
        forward.output_shardings[1],
    )
    keeps_values = recipe.needs_values(len(jax.tree.leaves(trace.parameters)))

    def run_backward(
        sums: Any, kept: Leaves, parameters: Any, values: Values, gradients: Any
    ) -> tuple[Any, Any]:
        of_parameters, of_values = recipe.build(kept, (parameters, values))(gradients)
        return _add(sums, of_parameters), of_values

    values = trace.values if keeps_values else ()
    given = Split.of(trace.results).smooth(trace.results)
    return library.compile(
        ("backward", trace.key, trace.is_first),
        run_backward,
        (trace.sums, residuals, trace.parameters, values, given),
        trace.devices,
        outputs=shardings_of((trace.sums, trace.split().smooth(trace.values))),
        donated=(0,),
    )[0]


def _compile_last(trace: StageTrace, library: ProgramLibrary) -> Program:
    split = trace.split()

    def run_last(
        sums: Any, parameters: Any, values: Values, draws: Draws | None, targets: Values
    ) -> tuple[Any, Any]:
        def run(own: Any, smooth: Any) -> jax.Array:
            whole = split.join(smooth, split.rest(values))
            return trace.measure_loss(own, whole, draws, targets)

        loss, (of_parameters, of_values) = jax.value_and_grad(run, argnums=(0, 1))(
            parameters, split.smooth(values)
        )
        return (_add(sums[0], of_parameters), sums[1] + loss), of_values

    sums = (trace.sums, trace.results)
    return library.compile(
        ("last", trace.key, trace.is_first, trace.loss, trace.parts),
        run_last,
        (sums, trace.parameters, trace.values, trace.draws, trace.targets),
        trace.devices,
        outputs=shardings_of((sums, split.smooth(trace.values))),
        donated=(0,),
    )[0]


def _add(sums: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, gradients)
