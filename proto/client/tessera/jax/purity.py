"""The check that a model's functions are pure, and fit each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from tessera.jax.errors import ModelRefused
from tessera.jax.models import Layer, Model, Params, Values


def check_model(model: Model, inputs: Values, targets: Values) -> None:
    """Check that functions have no side effects, by tracing each twice. Nothing is computed.

    ``inputs`` and ``targets`` are a micro-batch: arrays, or their shapes.

    Raises:
        ModelRefused: a function has a side effect or a hidden state, fails, or returns what the next
            one cannot use. The message names the layer.
    """
    values = _shapes_of(inputs)
    samples = _count_samples("the inputs", values)
    traced: dict[tuple[object, ...], None] = {}
    for layer in model.layers:
        key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
        own = _trace(f"init of layer {layer.name!r}", layer.init, key, repeats=True)
        _check_parameters(layer, own)
        keys = (jax.ShapeDtypeStruct((samples,), key.dtype),) if layer.is_random else ()
        about = (*layer.kind, str(values))
        name = f"layer {layer.name!r}"
        values = _trace(name, layer.apply, own, values, *keys, repeats=about not in traced)
        traced[about] = None
        if _count_samples(f"what {name} returns", values) != samples:
            raise ModelRefused(f"{name} changes the number of samples; the first axis must stay")
    mean = _trace("the loss", model.loss, values, _shapes_of(targets), repeats=True)
    if getattr(mean, "shape", None) != ():
        raise ModelRefused("the loss must return a scalar: the mean over the samples")


def _trace(name: str, function: Callable[..., Any], *arguments: Any, repeats: bool) -> Any:
    """Return the shapes of a function's results. If ``repeats``, check that it is pure."""
    try:
        with jax.checking_leaks():
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
            if repeats:
                again = jax.make_jaxpr(_rename(function))(*arguments)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        kind = "keeps values in a variable outside" if "eaked" in line else "cannot be traced"
        raise ModelRefused(f"{name} {kind}: {type(error).__name__}: {line}") from error
    effects = [effect for effect in traced.effects if "Debug" not in type(effect).__name__]
    if effects:
        raise ModelRefused(
            f"{name} has side effects ({', '.join(map(str, effects))}); move them to the loop"
        )
    if repeats and not _are_equal(traced, again):
        raise ModelRefused(
            f"{name} does something else each time it is called; take randomness from its key, and"
            " keep no state outside"
        )
    return shapes


def _rename(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that JAX does not know yet, so that it is traced again."""
    return lambda *arguments: function(*arguments)


def _are_equal(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    pairs = list(zip(one.consts, other.consts, strict=False))
    same = all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in pairs)
    return same and len(one.consts) == len(other.consts) and str(one.jaxpr) == str(other.jaxpr)


def _check_parameters(layer: Layer, own: Params) -> None:
    for leaf in jax.tree.leaves(own):
        if leaf.dtype != jnp.float32:
            raise ModelRefused(
                f"init of layer {layer.name!r} makes {leaf.dtype}; parameters must be float32, and the"
                " plan's precision is applied to them later"
            )


def _count_samples(name: str, values: Values) -> int:
    counts = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(values)}
    if len(counts) != 1:
        raise ModelRefused(f"{name}: all arrays must have the samples as their first axis")
    return int(counts.pop())


def _shapes_of(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)),
        tree,
    )
