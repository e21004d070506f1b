"""Abstract tracing of a step by JAX into its program, with the errors of tracing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from tessera.estimator.graph import Untraceable
from tessera.estimator.tracing.program import JaxProgram
from tessera.estimator.tracing.step import Step

CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def program_of(step: Step) -> JaxProgram:
    """Return the forward pass of a step as a program, without allocation.

    The values kept for the backward pass are those that JAX's own partial evaluation keeps
    (``jax.vjp``), so that a ``jax.checkpoint`` in the step has its effect.

    Raises:
        Untraceable: the step cannot be traced; the message says why and what to do.
    """
    shape = _traced(step, lambda: jax.eval_shape(step.loss, step.params, step.batch))
    if getattr(shape, "shape", None) != () or not np.issubdtype(shape.dtype, np.floating):
        raise Untraceable(
            f"{step.name}: the loss is {shape}; return one floating-point number, such as a mean over samples"
        )
    fixed, free = _split(step.params)
    if not free:
        raise Untraceable(f"{step.name}: no parameter is floating-point; there is nothing to train")

    def forward(weights: list[Any], others: list[Any], batch: Any) -> Any:
        def loss(now: list[Any]) -> Any:
            return step.loss(_join(step.params, now, others), batch)

        return jax.vjp(loss, weights)

    closed = _traced(step, lambda: _vjp_jaxpr(step, forward, free, fixed))
    program = JaxProgram()
    weights = [program.new(x.shape, x.dtype) for x in free]
    others = [program.new(x.shape, x.dtype) for x in fixed]
    batch = [program.new(x.shape, x.dtype) for x in jax.tree.leaves(step.batch)]
    program.parameters, program.batch = weights + others, batch
    program.loss, *program.residuals = program.inline(closed, [*weights, *others, *batch])
    return program


def _vjp_jaxpr(step: Step, forward: Any, free: list[Any], fixed: list[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(forward)(free, fixed, step.batch)


def _traced(step: Step, what: Any) -> Any:
    """Return the result of tracing, with JAX's errors as one sentence that says what to do."""
    try:
        return what()
    except CONCRETIZATION_ERRORS as error:
        raise Untraceable(
            f"{step.name}: Python needs the value of an array that is only known when the step runs "
            f"({_first_line(error)}); branch with jax.numpy.where or jax.lax.cond, and select with a mask, "
            "not with an index whose length depends on data"
        ) from error
    except ValueError as error:
        if "while_loop" not in str(error) and "fori_loop" not in str(error):
            raise _broken(step, error) from error
        raise Untraceable(
            f"{step.name}: a loop's number of turns depends on data, so its work is unknown; use "
            "jax.lax.scan, or jax.lax.fori_loop with bounds that are Python integers"
        ) from error
    except (TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        raise _broken(step, error) from error


def _broken(step: Step, error: Exception) -> Untraceable:
    return Untraceable(
        f"{step.name} fails while it is traced: {type(error).__name__}: {_first_line(error)}; make "
        "jax.eval_shape(loss, params, batch) and jax.grad of the loss work first"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _is_floating(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, np.floating))


def _split(params: Any) -> tuple[list[Any], list[Any]]:
    """Return the leaves that are not floating-point (seeds, tables) and those that are."""
    leaves = jax.tree.leaves(params)
    return [x for x in leaves if not _is_floating(x)], [x for x in leaves if _is_floating(x)]


def _join(params: Any, free: list[Any], fixed: list[Any]) -> Any:
    leaves, tree = jax.tree.flatten(params)
    moving, still = iter(free), iter(fixed)
    return jax.tree.unflatten(tree, [next(moving if _is_floating(x) else still) for x in leaves])
