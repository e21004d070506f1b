"""Dependencies and lifetimes of a program's values."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.estimator.programs.counts import ALIAS_PRIMITIVES
from tessera.estimator.programs.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Dependencies and lifetimes of a program's values. Lists are by value or by operator.

    ``active`` are the operators, in order, that the loss needs and that depend on the batch. The
    others only prepare weights or belong to the backward pass.
    """

    program: Program
    active: tuple[int, ...]
    from_batch: list[bool]
    root: list[int]  # the value of which this one is a view
    # For a value from weights alone: its parameters (or slices of them).
    sources: dict[int, frozenset[int]]
    last_read: list[int]  # position in ``active`` of the last reader of a root; -1 without readers

    def activation(self, value: int) -> bool:
        """Return whether a value is an activation, i.e. computed from the batch."""
        return self.from_batch[value] and self.root[value] not in self.program.batch

    def amount(self, values: set[int]) -> float:
        """Return the bytes of the given roots."""
        return sum(self.program.bytes_of(v) for v in values)


def flow_of(program: Program) -> Flow:
    """Return the flow of a program."""
    count = len(program.values)
    from_batch, root = [False] * count, list(range(count))
    for value in program.batch:
        from_batch[value] = True
    sources: dict[int, frozenset[int]] = {p: frozenset((p,)) for p in program.parameters}
    for op in program.operators:
        depends = any(from_batch[v] for v in op.reads)
        origin = frozenset[int]().union(*(sources.get(v, frozenset()) for v in op.reads))
        for out in op.writes:
            from_batch[out] = depends
            if op.name in ALIAS_PRIMITIVES and op.name != "stack_of":
                root[out] = root[op.reads[0]]
            if not depends and origin:
                own = op.name == "slice_of" and _whole(program, op.reads[0], origin)
                sources[out] = frozenset((out,)) if own else origin
    active = _needed(program, from_batch)
    last_read = [-1] * count
    for position, index in enumerate(active):
        for value in program.operators[index].reads:
            last_read[root[value]] = position
    return Flow(
        program=program,
        active=active,
        from_batch=from_batch,
        root=root,
        sources=sources,
        last_read=last_read,
    )


def _whole(program: Program, value: int, origin: frozenset[int]) -> bool:
    """Return whether a value is one whole parameter, possibly in another data type."""
    return len(origin) == 1 and program.shape(value) == program.shape(next(iter(origin)))


def _needed(program: Program, from_batch: list[bool]) -> tuple[int, ...]:
    wanted, kept = {program.loss}, []
    for index in range(len(program.operators) - 1, -1, -1):
        op = program.operators[index]
        if any(v in wanted for v in op.writes):
            wanted.update(op.reads)
            if any(from_batch[v] for v in op.writes):
                kept.append(index)
    return tuple(reversed(kept))
