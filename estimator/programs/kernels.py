"""Fusion of a layer's operators into kernels, with the memory that they touch and keep.

XLA fuses element-wise operators with each other and with the row-wise reductions among them.
Products, look-ups and sorts are separate kernels. An element-wise result is either kept for the
backward pass or computed again from the inputs of its kernel, whichever needs fewer bytes. Operands
of products are in memory anyway and are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.estimator.programs.counts import (
    ALIAS_PRIMITIVES,
    HEAVY_PRIMITIVES,
    UNFUSED_PRIMITIVES,
    is_reduction,
)
from tessera.estimator.programs.flow import Flow
from tessera.estimator.programs.program import Operator


@dataclass(slots=True)
class Kernel:
    """A group of operators. Values are roots, and ``inputs`` come from other kernels or layers."""

    operators: list[Operator]
    inputs: set[int]
    outputs: set[int]
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes of one layer's forward pass, and its number of kernels."""

    kernels: int
    touched: float
    kept: float
    working: float


def layer_footprints(flow: Flow, ends: list[int]) -> list[Footprint]:
    """Return the footprint of each layer.

    Values that cross into the next layer are its boundary and do not count as kept.
    """
    residuals = {flow.root[v] for v in _unstacked(flow) if flow.activation(v)}
    derived = _derived(flow, residuals)
    operands = {
        flow.root[v]
        for i in flow.active
        if flow.program.operators[i].name in HEAVY_PRIMITIVES
        for v in flow.program.operators[i].reads
    }
    held: set[int] = set()  # values that the layers so far keep or hand on
    prints, start = [], 0
    for end in ends:
        kernels = fuse_operators(flow, start, end)
        written = set[int]().union(*(k.outputs for k in kernels))
        crossing = {v for v in written if flow.last_read[v] >= end}
        before = held | crossing
        kept = _kept(flow, kernels, residuals, derived, operands, before)
        prints.append(
            Footprint(
                kernels=len(kernels),
                touched=sum(_touched(flow, k) for k in kernels),
                kept=flow.amount(kept - before),
                working=_working(flow, kernels, kept | before),
            )
        )
        held |= kept | crossing
        start = end
    return prints


def _touched(flow: Flow, kernel: Kernel) -> float:
    """Return the bytes that a kernel reads and writes.

    For ``pick``, only the picked bytes are read.
    """
    (op, *_) = kernel.operators
    if op.name != "pick":
        return flow.amount(kernel.inputs | kernel.outputs)
    source = {flow.root[op.reads[0]]}
    return flow.amount(kernel.inputs - source) + 2 * flow.amount(kernel.outputs)


def _unstacked(flow: Flow) -> list[int]:
    """Return the residuals. Residuals that a scan stacked are returned one by one."""
    stacks = {op.writes[0]: op.reads for op in flow.program.operators if op.name == "stack_of"}
    residuals, todo = [], list(flow.program.residuals)
    while todo:
        value = todo.pop()
        if value in stacks:
            todo.extend(stacks[value])
        else:
            residuals.append(value)
    return residuals


def fuse_operators(flow: Flow, start: int, end: int) -> list[Kernel]:
    """Return the kernels of the active operators ``start`` to ``end``, in an executable order."""
    program = flow.program
    ops = [program.operators[i] for i in flow.active[start:end]]
    writer = {v: n for n, op in enumerate(ops) for v in op.writes}
    level, parent = [0] * len(ops), list(range(len(ops)))

    def find(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    # The level of a kernel is above the levels of the kernels that it reads. Only kernels of equal
    # level are fused.
    for n, op in enumerate(ops):
        before = [writer[v] for v in op.reads if v in writer]
        level[n] = max((level[m] + _ends_kernel(flow, ops[m]) for m in before), default=0)
        if op.name in UNFUSED_PRIMITIVES:
            level[n] += 1
            continue
        for m in before:
            if level[m] == level[n] and ops[m].name not in UNFUSED_PRIMITIVES:
                parent[find(m)] = find(n)
    groups: dict[int, list[int]] = {}
    for n in range(len(ops)):
        groups.setdefault(find(n), []).append(n)
    ordered = sorted(groups.values(), key=lambda g: (level[g[0]], g[0]))
    kernels = [_kernel(flow, [ops[n] for n in group], end) for group in ordered]
    # Only values that are read outside their kernel are outputs.
    outside: set[int] = set().union(*(k.inputs for k in kernels))
    for kernel in kernels:
        kernel.outputs = {
            v
            for v in kernel.outputs
            if v in outside or flow.last_read[v] >= end or v == flow.root[program.loss]
        }
    return [k for k in kernels if any(op.name not in ALIAS_PRIMITIVES for op in k.operators)]


def _kernel(flow: Flow, ops: list[Operator], end: int) -> Kernel:
    outputs = {flow.root[v] for op in ops if op.name not in ALIAS_PRIMITIVES for v in op.writes}
    reads = {flow.root[v] for op in ops for v in op.reads if flow.from_batch[v]}
    if all(op.name in ALIAS_PRIMITIVES for op in ops):
        reads = set()
    return Kernel(ops, reads - outputs, outputs, alone=ops[0].name in UNFUSED_PRIMITIVES)


def _ends_kernel(flow: Flow, op: Operator) -> bool:
    """Return whether readers of this operator's result run in a later kernel."""
    if op.name in UNFUSED_PRIMITIVES:
        return True
    if not is_reduction(op.name):
        return False
    rank, axes = len(flow.program.shape(op.reads[0])), op.params["axes"]
    return sorted(axes) != list(range(rank - len(axes), rank)) or len(axes) == rank


def _kept(
    flow: Flow,
    kernels: list[Kernel],
    residuals: set[int],
    derived: dict[int, set[int]],
    operands: set[int],
    held: set[int],
) -> set[int]:
    """Return the values that these kernels keep.

    ``derived`` are the values that the backward pass prepares element by element, each with the
    values of the forward pass from which it is computed.
    """
    kept: set[int] = set()
    for kernel in kernels:
        written = {flow.root[v] for op in kernel.operators for v in op.writes}
        wanted = (residuals & written) - held
        kept |= wanted if kernel.alone else wanted & operands
        here = {r for r, origins in derived.items() if max(origins) in written}
        # Keep the remaining values, or the values from which they are computed if these have fewer
        # bytes.
        rest = (wanted - kept) | {r for r in here if not derived[r] <= kept | held}
        origins = set[int]().union(*(derived[r] for r in here & rest))
        instead = origins if kernel.alone else kernel.inputs | (origins - written)
        instead = instead.difference(flow.program.batch) - held - kept
        kept |= instead if flow.amount(instead) <= flow.amount(rest) else rest
    return kept


def _derived(flow: Flow, residuals: set[int]) -> dict[int, set[int]]:
    """Return residuals that only the backward pass needs, with the forward values behind them."""
    active = {v for i in flow.active for v in flow.program.operators[i].writes}
    active = {flow.root[v] for v in active} | set(flow.program.batch)
    writer = {v: op for op in flow.program.operators for v in op.writes}
    derived: dict[int, set[int]] = {}
    for residual in residuals - active:
        origins: set[int] = set()
        stack, seen = [residual], {residual}
        while stack:
            for v in writer[stack.pop()].reads if stack else ():
                value = flow.root[v]
                if not flow.from_batch[value] or value in seen:
                    continue
                seen.add(value)
                if value in active:
                    origins.add(value)
                else:
                    stack.append(value)
        if origins := origins.difference(flow.program.batch):
            derived[residual] = origins
    return derived


def _working(flow: Flow, kernels: list[Kernel], held: set[int]) -> float:
    """Return the most bytes live at the same time that are neither kept nor a boundary."""
    last = {v: n for n, kernel in enumerate(kernels) for v in kernel.inputs}
    alive: set[int] = set()
    most = 0.0
    for n, kernel in enumerate(kernels):
        alive |= {v for v in kernel.outputs if v not in held}
        most = max(most, flow.amount(alive))
        alive = {v for v in alive if last.get(v, -1) > n}
    return most
