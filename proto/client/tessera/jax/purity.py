"""Checks of a model's functions: pure, of the right types, and with the samples first.

The functions are traced, which runs no computation. Each kind of layer is traced twice. A function
whose second trace differs from its first depends on something besides its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tessera.jax.errors import ModelRefused
from tessera.jax.models import Layer, Model, Params, Values, named_leaves

_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-FX]+")
_FAULTS_OF_USERS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""What a user's function raises if it does not fit its arguments. JAX's own errors are among them."""

_LEFT_BEHIND: Final = (
    "{} uses an array that another call or layer left behind; a function may keep nothing that it"
    " computes outside of itself"
)

_PRINTS: Final = ("Debug",)
"""JAX's names of effects that only print. Those that keep an order run on one device only."""


def check_model(model: Model, inputs: Values, targets: Values) -> None:
    """Check that layers and the loss are pure and fit each other. Nothing is computed.

    ``inputs`` and ``targets`` are a micro-batch: arrays, or their shapes.

    Raises:
        ModelRefused: a function has side effects, depends on a hidden state, or returns what it may
            not; the message names the layer.
    """
    values, goals = _shapes_of(inputs), _shapes_of(targets)
    samples = _count_samples(values)
    results: dict[Hashable, Values] = {}
    for layer in model.layers:
        key = (layer.kind, _describe(values))
        if key not in results:
            parameters = _check_init(layer)
            results[key] = _check_apply(layer, parameters, values, samples)
        values = results[key]
    _check_loss(model, values, goals)


def _check_init(layer: Layer) -> Params:
    what = f"the init of layer {layer.name!r}"
    parameters = _trace_twice(what, layer.init, jax.eval_shape(lambda: jax.random.key(0)))
    for path, leaf in named_leaves(parameters):
        if leaf.dtype != jnp.float32:
            raise ModelRefused(
                f"{what} makes {path!r} as {leaf.dtype}; make all parameters as float32"
            )
    return parameters


def _check_apply(layer: Layer, parameters: Params, values: Values, samples: int) -> Values:
    what = f"layer {layer.name!r}"
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), samples))
    extra = (keys,) if layer.is_random else ()
    results = _trace_twice(what, layer.apply, parameters, values, *extra)
    if layer.is_random:
        shapes = _trace_twice(
            what, lambda *arguments: layer.apply(*arguments, None), parameters, values
        )
        if _describe(shapes) != _describe(results):
            raise ModelRefused(f"{what} returns other shapes without keys, i.e. in an evaluation")
    for leaf in jax.tree.leaves(results):
        if not leaf.shape or leaf.shape[0] != samples:
            raise ModelRefused(
                f"{what} returns an array of shape {leaf.shape} for {samples} samples; keep the"
                " samples as the first axis"
            )
    if not jax.tree.leaves(results):
        raise ModelRefused(f"{what} returns no array; return the values for the next layer")
    return results


def _check_loss(model: Model, values: Values, targets: Values) -> None:
    def measure(values: Values, targets: Values) -> Any:
        return model.loss(values, targets)

    loss = _trace_twice("the loss", measure, values, targets)
    leaves = jax.tree.leaves(loss)
    is_scalar = len(leaves) == 1 and leaves[0].shape == ()
    if not is_scalar or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        raise ModelRefused("the loss is not a floating-point scalar; return the mean over samples")


def _trace_twice(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the shapes of a function's results, after a check that its traces agree."""
    first, results = _trace(what, function, arguments)
    second, _ = _trace(what, function, arguments)
    if any(isinstance(const, jax.core.Tracer) for const in (*first.consts, *second.consts)):
        raise ModelRefused(_LEFT_BEHIND.format(what))
    if not _are_equal(first, second):
        raise ModelRefused(
            f"{what} differs from call to call: it depends on a counter, a random number or another"
            " hidden state; make it a pure function of its arguments"
        )
    effects = sorted(str(effect) for effect in first.effects if str(effect) not in _PRINTS)
    if effects:
        raise ModelRefused(
            f"{what} has side effects ({', '.join(effects)}); only jax.debug.print and"
            " jax.debug.callback without an order are allowed"
        )
    return results


def _trace(what: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the jaxpr of a function and the shapes of its results."""

    def call(*given: Any) -> Any:  # a new function, because JAX keeps traces of old ones
        return function(*given)

    try:
        return jax.make_jaxpr(call, return_shape=True)(*arguments)
    except jax.errors.UnexpectedTracerError as error:
        raise ModelRefused(_LEFT_BEHIND.format(what)) from error
    except _FAULTS_OF_USERS as error:
        shapes = _describe(arguments[1:])[1] if len(arguments) > 1 else ()
        given = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in shapes)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelRefused(f"{what} cannot be applied to ({given}): {reason}") from error


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two jaxprs compute the same. Addresses in their text do not count."""
    if _ADDRESS.sub("", str(first)) != _ADDRESS.sub("", str(second)):
        return False
    pairs = zip(first.consts, second.consts, strict=True)
    return all(one is other or np.array_equal(one, other) for one, other in pairs)


def _count_samples(inputs: Values) -> int:
    leaves = jax.tree.leaves(inputs)
    if not leaves or any(not leaf.shape or leaf.shape[0] != leaves[0].shape[0] for leaf in leaves):
        raise ModelRefused("the inputs are not arrays with one first axis, the samples")
    return int(leaves[0].shape[0])


def _describe(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what two trees of arrays with equal shapes have in common."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _shapes_of(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)),
        tree,
    )
