"""The collectives of a compiled module, corrected for the peculiarities of XLA's CPU back end.

That back end never forms a reduce-scatter. It all-reduces instead, and each device keeps its part.
It also computes 16-bit sums in 32 bits, so that collectives appear with twice their bytes. And it
adds up the results of several all-reduces, instead of reducing a sum
(:mod:`tessera.estimator.compiling.sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tessera.estimator.compiling.compiled import Collective
from tessera.estimator.compiling.hlo import ArrayShape, Computation, Instruction, Module, groups_of
from tessera.estimator.compiling.sums import VIEW_OPCODES, Part, absorbed_parts
from tessera.estimator.plans import Primitive

_PRIMITIVES = {
    "all-reduce": Primitive.ALL_REDUCE,
    "reduce-scatter": Primitive.REDUCE_SCATTER,
    "all-gather": Primitive.ALL_GATHER,
    "all-to-all": Primitive.ALL_TO_ALL,
    "ragged-all-to-all": Primitive.ALL_TO_ALL,
    "collective-permute": Primitive.SEND,
}
_NARROW_TYPES = ("bf16", "f16")

Test = Callable[[Instruction], bool]
Outside: TypeAlias = "tuple[Computation, Instruction, Outside] | None"


def collectives_of(module: Module, devices: int) -> tuple[Collective, ...]:
    """Return the collectives of a step, each with its number of runs, in the order of the text."""
    collectives: list[Collective] = []
    absorbed = absorbed_parts(module, devices)
    for name, computation in module.computations.items():
        for instruction in computation.instructions.values():
            opcode = instruction.opcode.removesuffix("-start")
            if opcode in _PRIMITIVES and (times := module.times.get(name, 0)):
                collectives += _read(module, computation, instruction, devices, times, absorbed)
    return tuple(collectives)


def _read(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    devices: int,
    times: int,
    absorbed: Mapping[Part, Part],
) -> Iterator[Collective]:
    """Yield a collective for each distinct correction of the parts of a combined one."""
    groups = groups_of(instruction, devices)
    size = max(map(len, groups))
    if size < 2:
        return
    primitive = _PRIMITIVES[instruction.opcode.removesuffix("-start")]
    totals: dict[tuple[Primitive, tuple[str, ...]], float] = {}
    takers = set(absorbed.values())
    for part, shape in enumerate(_payload_shapes(instruction)):
        if (instruction.name, part) in absorbed:
            continue
        kind, notes, payload = primitive, [], shape.bytes
        if primitive is Primitive.REDUCE_SCATTER:
            payload *= size
        if primitive is Primitive.ALL_REDUCE and _scatters(
            module, computation, instruction, part, shape, size
        ):
            kind = Primitive.REDUCE_SCATTER
            notes.append("reduce-scatter")
        if shape.type == "f32" and shape.dims and _narrow(module, computation, instruction, part):
            payload /= 2
            notes.append("dtype")
        if (instruction.name, part) in takers:
            notes.append("sum")
        key = (kind, tuple(notes))
        totals[key] = totals.get(key, 0.0) + payload
    for (kind, corrected), payload in totals.items():
        yield Collective(
            primitive=kind, payload_bytes=payload, groups=groups, times=times, corrected=corrected
        )


def _payload_shapes(instruction: Instruction) -> tuple[ArrayShape, ...]:
    """Return the arrays that are moved.

    The start of an asynchronous all-gather or send lists its operands before its results.
    """
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        half = len(instruction.shapes) // 2
        return instruction.shapes[half : 2 * half]
    return instruction.shapes


def _scatters(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    part: int,
    shape: ArrayShape,
    size: int,
) -> bool:
    """Return whether each device keeps no more than its part of the result."""

    def cut(user: Instruction) -> bool:
        return user.opcode == "dynamic-slice" and user.shapes[0].elements * size == shape.elements

    return _UseSearch(module, cut, VIEW_OPCODES | {"convert"}).part(computation, instruction, part)


def _narrow(module: Module, computation: Computation, instruction: Instruction, part: int) -> bool:
    """Return whether a 32-bit collective carries 16-bit numbers.

    It does if its sum was widened (which XLA's pass marks), if its operand was widened, or if its
    result is only used after narrowing.
    """
    if any(name.endswith("_promoted") for name in instruction.called):
        return True
    if part < len(instruction.operands):
        source = computation.instructions[instruction.operands[part]]
        if _widened(module, computation, source):
            return True

    def narrows(user: Instruction) -> bool:
        return user.opcode == "convert" and user.shapes[0].type in _NARROW_TYPES

    views = VIEW_OPCODES | {"slice", "dynamic-slice"}
    return _UseSearch(module, narrows, views).part(computation, instruction, part)


def _widened(module: Module, computation: Computation, source: Instruction) -> bool:
    if source.opcode == "fusion":
        computation = module.computations[source.called[0]]
        source = computation.root
    while source.opcode in VIEW_OPCODES and source.operands:
        source = computation.instructions[source.operands[0]]
    if source.opcode != "convert":
        return False
    return computation.instructions[source.operands[0]].shapes[0].type in _NARROW_TYPES


@dataclass(frozen=True, slots=True)
class _UseSearch:
    """A check of whether every use of a value passes ``test``.

    It follows the value through ``views``, and into and out of fusions.
    """

    module: Module
    test: Test
    views: frozenset[str]

    def part(self, computation: Computation, instruction: Instruction, part: int) -> bool:
        """Return the answer for one part of a result that may be a tuple."""
        starts = [instruction]
        if len(instruction.shapes) > 1:
            starts = [
                user
                for user in computation.users.get(instruction.name, [])
                if f"index={part}" in user.attributes.replace(" ", "").split(",")
            ]
        return bool(starts) and all(self._leads(computation, s, None) for s in starts)

    def _leads(self, computation: Computation, value: Instruction, outside: Outside) -> bool:
        """Return the answer for a value. Where it leaves a fusion, its uses ``outside`` count."""
        users = computation.users.get(value.name, [])
        if value.root and (outside is None or not self._leads(*outside)):
            return False
        return (value.root or bool(users)) and all(
            self._passes(computation, value, user, outside) for user in users
        )

    def _passes(
        self, computation: Computation, value: Instruction, user: Instruction, outside: Outside
    ) -> bool:
        if self.test(user):
            return True
        if user.opcode in self.views:
            return self._leads(computation, user, outside)
        if user.opcode != "fusion":
            return False
        inner = self.module.computations[user.called[0]]
        places = [n for n, operand in enumerate(user.operands) if operand == value.name]
        return all(
            self._leads(inner, inner.parameter(n), (computation, user, outside)) for n in places
        )
