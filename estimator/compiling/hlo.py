"""Reader of XLA's compiled text: computations, instructions, shapes, loops and groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tessera.estimator.compiling.compiled import Uncompilable
from tessera.formulation.tables import Ints

ITEM_BYTES = {
    "pred": 1,
    "s4": 1,
    "u4": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
    "c128": 16,
    "token": 0,
}

_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
_SHAPE = re.compile(r"(?P<type>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition)=%([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """The data type and dimensions of one array."""

    type: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Return the bytes of the array."""
        if self.type not in ITEM_BYTES:
            raise Uncompilable(f"the compiled step has arrays of the unknown type {self.type}")
        return float(self.elements * ITEM_BYTES[self.type])


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. ``shapes`` are those of its result, several for a tuple."""

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    attributes: str
    called: tuple[str, ...]
    root: bool

    @property
    def bytes(self) -> float:
        """Return the bytes of the result."""
        return sum(s.bytes for s in self.shapes)

    def dims(self, attribute: str) -> tuple[int, ...]:
        """Return an attribute such as ``lhs_contracting_dims``. If it is missing, return ()."""
        match = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(d) for d in match.group(1).split(",") if d) if match else ()


@dataclass(slots=True)
class Computation:
    """The instructions of a computation by name, in order, with the users of each result."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    users: dict[str, list[Instruction]] = field(default_factory=dict)

    def add(self, instruction: Instruction) -> None:
        """Append an instruction."""
        self.instructions[instruction.name] = instruction
        for operand in dict.fromkeys(instruction.operands):
            self.users.setdefault(operand, []).append(instruction)

    @property
    def root(self) -> Instruction:
        """Return the instruction whose result is that of the computation."""
        return next(i for i in self.instructions.values() if i.root)

    def parameter(self, number: int) -> Instruction:
        """Return a parameter by its number."""
        return next(
            i
            for i in self.instructions.values()
            if i.opcode == "parameter" and i.attributes.startswith(f"{number})")
        )


@dataclass(frozen=True, slots=True)
class Module:
    """Computations by name, with the runs of each in a step (including fusions and loops)."""

    computations: dict[str, Computation]
    entry: str
    times: dict[str, int]


def read_module(text: str) -> Module:
    """Return the module of a compiled text.

    Raises:
        Uncompilable: there is no entry computation, or a loop has no known number of turns.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current = Computation(start["name"])
            computations[current.name] = current
            entry = current.name if start["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.add(_instruction(match))
    if not entry:
        raise Uncompilable(
            "the compiled text has no entry computation; this version of XLA writes another form"
        )
    times: dict[str, int] = {}
    for name, turns in _runs(computations, entry, 1):
        times[name] = times.get(name, 0) + turns
    return Module(computations, entry, times)


def _instruction(match: re.Match[str]) -> Instruction:
    rest = match["rest"]
    inside, after = _split_call(rest)
    called = [
        name
        for one, several in _CALLED.findall(after)
        for name in ([one] if one else _OPERAND.findall(several))
    ]
    literal = match["opcode"] in ("constant", "parameter")
    return Instruction(
        name=match["name"],
        opcode=match["opcode"],
        shapes=shapes_in(match["shape"]),
        operands=() if literal else tuple(_OPERAND.findall(inside)),
        attributes=rest if literal else after,
        called=tuple(called),
        root=match["root"] is not None,
    )


def shapes_in(text: str) -> tuple[ArrayShape, ...]:
    """Return the arrays of a shape from its text."""
    return tuple(
        ArrayShape(m["type"], tuple(int(d) for d in m["dims"].split(",") if d))
        for m in _SHAPE.finditer(text)
    )


def _split_call(rest: str) -> tuple[str, str]:
    """Return operands and attributes, split at the closing bracket of the call."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:place], rest[place + 1 :]
    return rest, ""


def _runs(computations: dict[str, Computation], name: str, turns: int) -> Iterator[tuple[str, int]]:
    yield name, turns
    for instruction in computations[name].instructions.values():
        inner = turns * (trip_count(instruction) if instruction.opcode == "while" else 1)
        for called in instruction.called:
            yield from _runs(computations, called, inner)


def trip_count(loop: Instruction) -> int:
    """Return the turns of a loop.

    Raises:
        Uncompilable: XLA does not know the number of turns.
    """
    match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if match is None:
        raise Uncompilable(
            f"loop {loop.name} has no known number of turns, so its work cannot be counted; use jax.lax.scan"
        )
    return int(match.group(1))


def groups_of(instruction: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices of a collective, from any form in which XLA writes them.

    Raises:
        Uncompilable: the groups are written in an unknown form.
    """
    text = instruction.attributes
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", text):
        return tuple(
            tuple(int(d) for d in group.split(","))
            for group in re.findall(r"\{([\d,]+)\}", match[1])
        )
    if re.search(r"replica_groups=\{\}", text):
        return (tuple(range(devices)),)
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota_groups(*(_numbers(part) for part in match.groups()))
    if match := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? ?\{([^}]*)\}", text
    ):
        return _mesh_groups(match[1], match[2], match[3])
    raise Uncompilable(f"{instruction.name}: groups are written in an unknown form")


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",")) if text else ()


def _iota_groups(
    shape: tuple[int, ...], grid: tuple[int, ...], order: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    ids = np.arange(math.prod(grid)).reshape(grid)
    ids = ids.transpose(order) if order else ids
    return tuple(tuple(map(int, group)) for group in ids.reshape(shape))


def _mesh_groups(axes: str, devices: str | None, over: str) -> tuple[tuple[int, ...], ...]:
    """Return groups over axes of a mesh. Its devices are listed or a permuted grid (``[2,2]T(1,0)``)."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    ids: Ints = np.arange(math.prod(sizes.values()))
    if devices and (grid := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices)):
        ids = ids.reshape(_numbers(grid[1]))
        ids = ids.transpose(_numbers(grid[2])) if grid[2] else ids
    elif devices:
        ids = np.array(_numbers(devices))
    wanted = re.findall(r"'(\w+)'", over)
    order = [n for n in sizes if n not in wanted] + wanted
    ids = ids.reshape(tuple(sizes.values())).transpose([list(sizes).index(n) for n in order])
    size = math.prod(sizes[n] for n in wanted)
    return tuple(tuple(map(int, group)) for group in ids.reshape(-1, size))
