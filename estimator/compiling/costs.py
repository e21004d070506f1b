"""FLOPs and bytes of a compiled module, with all turns of loops.

XLA's own cost analysis counts the body of a loop once. This module counts the further turns.
"""

from __future__ import annotations

import math

from tessera.estimator.compiling.hlo import Computation, Instruction, Module

_FREE_OPCODES = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "after-all",
        "partition-id",
        "replica-id",
    }
)
_MOVE_OPCODES = _FREE_OPCODES | frozenset(
    {
        "broadcast",
        "reshape",
        "transpose",
        "copy",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "iota",
        "concatenate",
        "pad",
        "reverse",
        "gather",
        "scatter",
        "convert",
        "fusion",
        "select",
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "custom-call",
        "copy-start",
        "copy-done",
    }
)


def further_turns(module: Module) -> tuple[float, float]:
    """Return the FLOPs and bytes of all turns of loops except the first."""
    fused = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode not in ("while", "conditional", "call")
        for name in instruction.called
    }
    flops = moved = 0.0
    for name, computation in module.computations.items():
        further = module.times.get(name, 1) - 1
        if further <= 0:
            continue
        instructions = computation.instructions.values()
        flops += further * sum(flops_of(computation, i) for i in instructions)
        if name not in fused:
            moved += further * sum(_bytes(module, computation, i) for i in instructions)
    return flops, moved


def flops_of(computation: Computation, instruction: Instruction) -> float:
    """Return the FLOPs of an instruction: two per multiply-add, else one per element."""
    if instruction.opcode in _MOVE_OPCODES:
        return 0.0
    out = sum(s.elements for s in instruction.shapes)
    first = (
        computation.instructions[instruction.operands[0]].shapes[0].dims
        if instruction.operands
        else ()
    )
    if instruction.opcode == "dot":
        return 2.0 * out * math.prod(first[d] for d in instruction.dims("lhs_contracting_dims"))
    if instruction.opcode == "convolution":
        return 2.0 * out * _taps(computation, instruction)
    if instruction.opcode in ("reduce", "reduce-window"):
        return float(math.prod(first))
    return float(out)


def _taps(computation: Computation, instruction: Instruction) -> float:
    """Return the multiply-adds for one element of a convolution's result."""
    kernel = computation.instructions[instruction.operands[1]].shapes[0].dims
    labels = instruction.attributes.partition("dim_labels=")[2].partition("_")[2].partition("->")[0]
    return math.prod(kernel) / kernel[labels.index("o")]


def _bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Return the bytes that one instruction reads and writes. Only the slices of sliced operands
    count."""
    if instruction.opcode in _FREE_OPCODES:
        return 0.0
    if instruction.opcode == "dynamic-slice":
        return 2 * instruction.bytes
    if instruction.opcode == "dynamic-update-slice":
        return 2 * computation.instructions[instruction.operands[1]].bytes
    if instruction.opcode != "fusion":
        reads = (computation.instructions[o].bytes for o in instruction.operands)
        return sum(reads) + instruction.bytes
    inner = module.computations[instruction.called[0]]
    root = inner.root
    updates = root.opcode == "dynamic-update-slice"
    written = inner.instructions[root.operands[1]].bytes if updates else instruction.bytes
    reads = (_read_bytes(inner, inner.parameter(n)) for n in range(len(instruction.operands)))
    return written + sum(reads)


def _read_bytes(inner: Computation, parameter: Instruction) -> float:
    users = inner.users.get(parameter.name, [])
    if users and all(u.opcode == "dynamic-slice" for u in users):
        return sum(u.bytes for u in users)
    if users and all(
        u.opcode == "dynamic-update-slice" and u.operands[0] == parameter.name for u in users
    ):
        return 0.0
    return parameter.bytes
