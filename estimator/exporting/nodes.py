"""An exported PyTorch program in our own form, so that only its reader needs PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tessera.estimator.programs.program import Value


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A tensor among a node's arguments, as the number of its value."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of an ATen operator.

    ``target`` is its name without overload (``linear``), with its namespace if that is not ATen
    (``xformers::attention``). ``arguments`` are by the schema's names, including defaults. Tensors
    are ``ValueRef``. ``writes`` are the tensors among its results, with -1 for other results. ``path``
    is that of the module that calls it.
    """

    target: str
    arguments: Mapping[str, Any]
    writes: tuple[int, ...]
    pointwise: bool = False
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedProgram:
    """The forward pass of a module: nodes in order over numbered values, without in-place ones."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    parameters: tuple[int, ...]
    inputs: tuple[int, ...]  # tensors among the example arguments, in their order
    results: tuple[int, ...]  # tensors that the module returns


def values_in(argument: Any) -> Iterator[int]:
    """Yield the values in an argument, including those in lists."""
    if isinstance(argument, ValueRef):
        yield argument.value
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from values_in(part)


def values_read(node: Node) -> tuple[int, ...]:
    """Return the values that a node reads, in the schema's order."""
    return tuple(v for argument in node.arguments.values() for v in values_in(argument))
