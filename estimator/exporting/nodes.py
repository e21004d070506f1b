"""An exported PyTorch program in a form of our own, so that all but reading it needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tessera.estimator.programs.program import Value


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor among a node's arguments: the number of its value."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of an ATen operator.

    ``target``: its name without overload (``linear``), with its namespace where that is not ATen
    (``xformers::attention``). ``arguments``: by the schema's names, defaults too; tensors are ``Ref``.
    ``writes``: the tensors among its results, -1 for what is none. ``path``: of the module that calls it.
    """

    target: str
    arguments: Mapping[str, Any]
    writes: tuple[int, ...]
    pointwise: bool = False
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The forward pass of a module: its nodes in order over numbered values, nothing done in place."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    parameters: tuple[int, ...]
    inputs: tuple[int, ...]  # tensors among the example arguments, in their order
    results: tuple[int, ...]  # tensors that the module returns


def refs(argument: Any) -> Iterator[int]:
    """Yield the values in an argument, lists searched."""
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from refs(part)


def reads(node: Node) -> tuple[int, ...]:
    """Return the values that a node reads, in the schema's order."""
    return tuple(v for argument in node.arguments.values() for v in refs(argument))
