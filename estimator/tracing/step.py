"""A training step as the tracer takes it, and the loader of users' steps.

A user's step is a function ``module:function`` without required arguments that returns ``(loss,
params, batch)``: a function ``loss(params, batch)`` to a scalar, the parameters, and a batch. All
leaves of the batch have the samples as their first axis. Parameters and batch may be abstract
(``jax.ShapeDtypeStruct``) and should be for large models, because only shapes and types are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from tessera.estimator.graph import Untraceable
from tessera.estimator.programs.targets import check_call, function_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A loss of parameters and a batch, both of which are trees of arrays or of shapes."""

    name: str
    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any

    @property
    def samples(self) -> int:
        """Return the first axis of the batch.

        Raises:
            Untraceable: a leaf has no first axis, or the leaves have different ones.
        """
        leading = {tuple(leaf.shape)[:1] for leaf in jax.tree.leaves(self.batch)}
        if len(leading) != 1 or leading == {()}:
            raise Untraceable(
                f"{self.name}: the leaves of the batch begin with {sorted(leading)}; every leaf must have "
                "the same number of samples as its first axis"
            )
        (first,) = leading.pop()
        if not isinstance(first, int) or first < 1:
            raise Untraceable(
                f"{self.name}: the batch has {first} samples; give a fixed number of at least 1"
            )
        return first


def load_step(target: str, arguments: Mapping[str, Any] | None = None) -> Step:
    """Return the step that ``module:function`` makes, called with these keyword arguments.

    Raises:
        Untraceable: the name does not have that form, there is no such function, or it returns
            something else.
    """
    make, given = function_of(target), dict(arguments or {})
    check_call(target, make, given)
    made = make(**given)
    if isinstance(made, Step):
        return made
    if not isinstance(made, tuple) or len(made) != 3 or not callable(made[0]):
        raise Untraceable(
            f"{target} returned {type(made).__name__}; it must return (loss, params, batch), where loss is a "
            "function of params and batch"
        )
    loss, params, batch = made
    return Step(name=target, loss=loss, params=abstract_tree(params), batch=abstract_tree(batch))


def abstract_tree(tree: Any) -> Any:
    """Return a tree of arrays as shapes and data types only."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
