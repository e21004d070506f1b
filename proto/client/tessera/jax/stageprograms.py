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

Leaves: TypeAlias = tuple[jax.Array, ...]
StageFunction: TypeAlias = Callable[..., Values]
"""``function(parameters, values, draws)``: the layers of a stage, in order."""


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
    function: StageFunction
    layout: StageLayout
    parameters: tuple[Params, ...]
    sums: tuple[Params, ...]
    draws: Any
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

    def arguments(self) -> tuple[Any, ...]:
        """Return the shapes of what forward programs get."""
        arguments = (self.parameters, self.values, self.draws)
        if self.loss is None:
            return arguments
        return (*arguments, self.targets, self.results)

    def measure_loss(self, results: Values, targets: Values) -> jax.Array:
        """Return the loss of the last stage's results, in float32."""
        if self.loss is None:
            raise TypeError("only the last stage has a loss")
        return self.loss(results, targets).astype(jnp.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrograms:
    """The compiled programs of a stage for one shape of micro-batches.

    * ``zeros() -> (sums, loss)``: the sums before the first micro-batch.
    * ``forward(parameters, values, draws) -> (results, residuals)``; the last stage's is
      ``forward(parameters, values, draws, targets, loss) -> (loss, residuals)``.
    * ``backward(residuals, parameters, values, sums, *gradients) -> (gradients, sums)``.
    """

    zeros: Program
    forward: Program
    backward: Program
    keeps_values: bool
    """Whether the backward program needs the stage's values."""


def shardings_of(tree: Any) -> Any:
    """Return the shardings of shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def compile_stage(trace: StageTrace, library: ProgramLibrary) -> StagePrograms:
    """Compile the programs of a stage, or load those of a stage that is alike."""
    forward, recipe, residuals = _compile_forward(trace, library)
    return StagePrograms(
        zeros=_compile_zeros(trace, library),
        forward=forward,
        backward=_compile_backward(trace, library, recipe, residuals),
        keeps_values=recipe.needs_values(len(jax.tree.leaves(trace.parameters))),
    )


def _scalar(layout: StageLayout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=layout.whole())


def _compile_zeros(trace: StageTrace, library: ProgramLibrary) -> Program:
    shapes = (trace.sums, _scalar(trace.layout))

    def make_zeros() -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    places = shardings_of(shapes)
    key = ("zeros", jax.tree.structure(shapes), tuple(x.shape for x in jax.tree.leaves(shapes)))
    return library.compile(key, make_zeros, (), trace.devices, outputs=places)[0]


def _compile_forward(
    trace: StageTrace, library: ProgramLibrary
) -> tuple[Program, Recipe, tuple[jax.ShapeDtypeStruct, ...]]:
    """Return the forward program, how to build its vjp function, and the residuals' shapes."""
    recipe = Recipe()
    program, recipe = library.compile(
        ("forward", trace.key, trace.is_first, trace.loss, trace.parts),
        _make_middle(trace, recipe) if trace.loss is None else _make_last(trace, recipe),
        trace.arguments(),
        trace.devices,
        outputs=(shardings_of(trace.results), None),
        donated=() if trace.loss is None else (4,),
        note=lambda: recipe,
    )
    residuals = jax.tree.map(
        lambda info, place: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=place),
        program.out_info[1],
        program.output_shardings[1],
    )
    return program, recipe, residuals


def _make_middle(trace: StageTrace, recipe: Recipe) -> Callable[..., Any]:
    split, kinds = Split.of(trace.values, is_fixed=trace.is_first), Split.of(trace.results)

    def run_middle(parameters: Any, values: Values, draws: Any) -> tuple[Values, Leaves]:
        def run(own: Any, smooth: Any) -> tuple[Any, Any]:
            results = trace.function(own, split.join(smooth, split.rest(values)), draws)
            return kinds.smooth(results), kinds.rest(results)

        smooth, vjp, rest = jax.vjp(run, parameters, split.smooth(values), has_aux=True)
        return kinds.join(smooth, rest), recipe.take(vjp, (parameters, values))

    return run_middle


def _make_last(trace: StageTrace, recipe: Recipe) -> Callable[..., Any]:
    split, parts = Split.of(trace.values, is_fixed=trace.is_first), trace.parts

    def run_last(
        parameters: Any, values: Values, draws: Any, targets: Values, total: jax.Array
    ) -> tuple[jax.Array, Leaves]:
        def run(own: Any, smooth: Any) -> jax.Array:
            results = trace.function(own, split.join(smooth, split.rest(values)), draws)
            return trace.measure_loss(results, targets) / parts

        mean, vjp = jax.vjp(run, parameters, split.smooth(values))
        return total + mean, recipe.take(vjp, (parameters, values))

    return run_last


def compile_evaluation(trace: StageTrace, library: ProgramLibrary) -> Program:
    """Return ``forward`` of a stage without residuals. The loss is not divided by ``parts``."""

    def run_middle(parameters: Any, values: Values, draws: Any) -> Values:
        return trace.function(parameters, values, draws)

    def run_last(
        parameters: Any, values: Values, draws: Any, targets: Values, total: jax.Array
    ) -> jax.Array:
        return total + trace.measure_loss(trace.function(parameters, values, draws), targets)

    return library.compile(
        ("evaluation", trace.key, trace.loss),
        run_middle if trace.loss is None else run_last,
        trace.arguments(),
        trace.devices,
        outputs=shardings_of(trace.results),
    )[0]


def _compile_backward(
    trace: StageTrace,
    library: ProgramLibrary,
    recipe: Recipe,
    residuals: tuple[jax.ShapeDtypeStruct, ...],
) -> Program:
    is_last = trace.loss is not None
    keeps_values = recipe.needs_values(len(jax.tree.leaves(trace.parameters)))
    values = trace.values if keeps_values else ()

    def run(kept: Leaves, parameters: Any, values: Values, sums: Any, *gradients: Any) -> Any:
        vjp = recipe.build(kept, (parameters, values))
        given = jnp.ones((), jnp.float32) if is_last else gradients[0]
        of_parameters, of_values = vjp(given)
        total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, of_parameters)
        return of_values, total

    smooth_in = Split.of(trace.values, is_fixed=trace.is_first).smooth(trace.values)
    gradients = () if is_last else (Split.of(trace.results).smooth(trace.results),)
    sums = trace.sums
    return library.compile(
        ("backward", trace.key, trace.is_first, trace.loss, trace.parts),
        run,
        (residuals, trace.parameters, values, sums, *gradients),
        trace.devices,
        outputs=(shardings_of(smooth_in), shardings_of(sums)),
        donated=(3,),
    )[0]
