"""All-reduces whose results are only added up, which XLA's GPU back end turns into one.

XLA's pass ``AllReduceReassociate`` replaces a sum of all-reduces by the all-reduce of a sum. The CPU
back end does not run it. The gradients of several products that read one activation, or of a table
that is used twice, are such sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from tessera.estimator.compiling.hlo import Computation, Instruction, Module, groups_of

VIEW_OPCODES = frozenset({"get-tuple-element", "bitcast", "copy", "reshape", "transpose"})
_THROUGH_OPCODES = VIEW_OPCODES | {"convert", "dynamic-slice"}
"""Instructions that change neither what is added up nor for which elements. A slice is each device's
part, as in a reduce-scatter, whose sums the GPU back end reassociates, too."""

Part = tuple[str, int]
"""An all-reduce by its name, and the number of one of its results."""

Groups: TypeAlias = tuple[tuple[int, ...], ...]
_Place: TypeAlias = tuple[Computation, Instruction]


@dataclass(frozen=True, slots=True)
class _Sum:
    """A value that is one all-reduce's result, or a sum of several results.

    ``kind`` is equal for values whose all-reduces can become one: their groups, their numbers of
    elements and the computation in which they run.
    """

    parts: tuple[Part, ...]
    kind: tuple[Groups, int, str]


def absorbed_parts(module: Module, devices: int) -> dict[Part, Part]:
    """Return the parts of all-reduces that can be left out, with the part that takes them in."""
    search = _Search(module, devices)
    for computation in module.computations.values():
        if not search.is_fused(computation):
            search.visit(computation)
    return search.absorbed


@dataclass(slots=True)
class _Search:
    """A search for sums. ``callers`` are the fusions that call a computation."""

    module: Module
    devices: int
    absorbed: dict[Part, Part] = field(default_factory=dict)
    _callers: dict[str, list[_Place]] = field(default_factory=dict)
    _sums: dict[tuple[str, str], _Sum | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for computation in self.module.computations.values():
            for instruction in computation.instructions.values():
                if instruction.opcode == "fusion":
                    name = instruction.called[0]
                    self._callers.setdefault(name, []).append((computation, instruction))

    def is_fused(self, computation: Computation) -> bool:
        """Return whether a computation is the body of a fusion."""
        return computation.name in self._callers

    def visit(self, computation: Computation) -> None:
        """Look at all additions in the order in which they are computed."""
        for instruction in computation.instructions.values():
            if instruction.opcode == "add":
                self.sum_of((computation, instruction))
            elif instruction.opcode == "fusion":
                self.visit(self.module.computations[instruction.called[0]])

    def sum_of(self, place: _Place) -> _Sum | None:
        """Return the sum that an addition makes of all-reduces, or None."""
        key = place[0].name, place[1].name
        if key not in self._sums:
            self._sums[key] = None  # the value while it is computed
            self._sums[key] = self._add(place)
        return self._sums[key]

    def _add(self, place: _Place) -> _Sum | None:
        computation, addition = place
        terms = [self._term(computation, operand, place) for operand in addition.operands]
        if len(terms) != 2 or len(self._origins(place)) != 2:
            return None
        first, second = terms
        if first is None or second is None or first.kind != second.kind:
            return None
        parts = tuple(sorted({*first.parts, *second.parts}))
        self.absorbed |= dict.fromkeys(parts[1:], parts[0])
        return _Sum(parts, first.kind)

    def _term(self, computation: Computation, name: str, user: _Place) -> _Sum | None:
        """Return an operand of an addition as a sum, if nothing else computes with it."""
        place, index = self._origin(computation, name)
        found = self.sum_of(place) if place[1].opcode == "add" else self._part(place, index)
        return found if found is not None and self._serves_only(place, index, user) else None

    def _origin(self, computation: Computation, name: str) -> tuple[_Place, int]:
        """Return the instruction that computed a value, and the number of its result.

        The search goes through views, and into and out of fusions.
        """
        index, place = 0, (computation, computation.instructions[name])
        while True:
            at, value = place
            if value.opcode == "parameter" and len(self._callers.get(at.name, [])) == 1:
                outer, fusion = self._callers[at.name][0]
                number = int(value.attributes.partition(")")[0])
                place = outer, outer.instructions[fusion.operands[number]]
            elif value.opcode == "fusion":
                inner = self.module.computations[value.called[0]]
                place = inner, inner.root
            elif value.opcode in _THROUGH_OPCODES:
                if value.opcode == "get-tuple-element":
                    index = int(value.attributes.partition("index=")[2].partition(",")[0])
                place = at, at.instructions[value.operands[0]]
            else:
                return place, index

    def _origins(self, addition: _Place) -> frozenset[object]:
        """Return what an addition adds up. Copies of one addition in several fusions have the same."""
        origins: set[object] = set()
        for operand in addition[1].operands:
            place, index = self._origin(addition[0], operand)
            of_sum = self.sum_of(place) if place[1].opcode == "add" else None
            origins.add(of_sum.parts if of_sum else (place[0].name, place[1].name, index))
        return frozenset(origins)

    def _part(self, place: _Place, index: int) -> _Sum | None:
        computation, value = place
        if value.opcode != "all-reduce" or index >= len(value.shapes):
            return None
        groups = groups_of(value, self.devices)
        kind = (groups, value.shapes[index].elements, computation.name)
        return _Sum(((value.name, index),), kind)

    def _serves_only(self, place: _Place, index: int, addition: _Place) -> bool:
        """Return whether an addition and its copies are all that computes with a value."""
        wanted = self._origins(addition)
        return all(
            user is not None and user[1].opcode == "add" and self._origins(user) == wanted
            for user in self._users(place, index, outside=())
        )

    def _users(
        self, place: _Place, index: int, outside: tuple[_Place, ...]
    ) -> Iterator[_Place | None]:
        """Yield the instructions that compute with a value. None stands for a use outside."""
        computation, value = place
        if value.root:
            if outside:
                yield from self._users(outside[-1], 0, outside[:-1])
            elif callers := self._callers.get(computation.name, []):
                for caller in callers:
                    yield from self._users(caller, 0, ())
            else:
                yield None
        for user in computation.users.get(value.name, []):
            yield from self._uses((computation, user), value, index, outside)

    def _uses(
        self, place: _Place, value: Instruction, index: int, outside: tuple[_Place, ...]
    ) -> Iterator[_Place | None]:
        computation, user = place
        if user.opcode == "get-tuple-element":
            if f"index={index}" in user.attributes.replace(" ", "").split(","):
                yield from self._users(place, 0, outside)
        elif user.opcode in _THROUGH_OPCODES:
            yield from self._users(place, 0, outside)
        elif user.opcode == "fusion":
            inner = self.module.computations[user.called[0]]
            for number, operand in enumerate(user.operands):
                if operand == value.name:
                    parameter = inner, inner.parameter(number)
                    yield from self._users(parameter, 0, (*outside, place))
        else:
            yield computation, user
