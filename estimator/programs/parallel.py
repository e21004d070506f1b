"""Tensor and expert parallelism of a program, by Megatron's rule (Shoeybi et al. 2019, section 3).

A product of an activation with weights divides the weights by columns. The next product that
contracts the divided axis divides its weights by rows and all-reduces its result. In between, the
divided axis is followed through the operators. Weights with an axis of experts (a batch axis of the
product) are divided by expert. Their inputs and outputs move between GPUs (GShard, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tessera.estimator.programs.axes import follow_axis
from tessera.estimator.programs.flow import Flow
from tessera.estimator.programs.program import Operator

SMALL_PRODUCT_SHARE = 0.01
"""Share of its layer's FLOPs below which a product (router, relative position) is not divided."""

Axis = int | None


@dataclass(slots=True)
class Division:
    """The division of values and weights, and the bytes that each layer communicates for it."""

    tensor: dict[int, int] = field(default_factory=dict)  # value: its divided axis
    expert: dict[int, int] = field(default_factory=dict)
    # Values computed from weights that are divided.
    weights: set[int] = field(default_factory=set)
    expert_weights: set[int] = field(default_factory=set)
    reduced: list[float] = field(default_factory=list)
    exchanged: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)


def divide_program(flow: Flow, ends: list[int]) -> Division:
    """Return the division of a program whose layers end at ``ends``. Its lists are by layer.

    A divided value that crosses into the next layer is gathered. It counts half, because an
    all-gather moves half the bytes of an all-reduce.
    """
    division = Division()
    start = 0
    for end in ends:
        ops = [flow.program.operators[i] for i in flow.active[start:end]]
        _layer(flow, division, ops)
        crossing = {
            v
            for op in ops
            for v in op.writes
            if v in division.tensor and flow.last_read[flow.root[v]] >= end
        }
        gathered = {flow.root[v] for v in crossing}
        division.reduced[-1] += flow.amount(gathered) / 2
        for value in [v for v in division.tensor if flow.root[v] in gathered]:
            del division.tensor[value]
        start = end
    return division


def _layer(flow: Flow, division: Division, ops: list[Operator]) -> None:
    division.reduced.append(0.0)
    division.exchanged.append(0.0)
    division.experts.append(1.0)
    division.limit.append(2.0**30)
    total = sum(op.flops for op in ops)
    for op in ops:
        if op.name == "dot_general":
            _product(flow, division, op, large=op.flops >= SMALL_PRODUCT_SHARE * total)
        elif op.name == "conv_general_dilated":
            _convolution(flow, division, op, large=op.flops >= SMALL_PRODUCT_SHARE * total)
        else:
            _other(flow, division, op)
        for out in op.writes:
            if (axis := division.tensor.get(out)) is not None:
                size = flow.program.shape(out)[axis]
                if op.name == "dot_general" and not any(_is_weight(flow, v) for v in op.reads):
                    size &= -size  # whole heads of attention; degrees are powers of two
                division.limit[-1] = min(division.limit[-1], float(size))


def _is_weight(flow: Flow, value: int) -> bool:
    return bool(flow.sources.get(value))


def _product(flow: Flow, division: Division, op: Operator, *, large: bool) -> None:
    contracted, _ = op.params["dimension_numbers"]
    if _is_weight(flow, op.reads[0]) != _is_weight(flow, op.reads[1]):
        side = 0 if _is_weight(flow, op.reads[0]) else 1
        _weights_product(flow, division, op, side, large=large)
        return
    (out,) = op.writes
    for mark, moved in ((division.expert, division.exchanged), (division.tensor, division.reduced)):
        places = [_place(flow, op, s, mark.get(op.reads[s])) for s in (0, 1)]
        ends_here = [
            s for s in (0, 1) if (a := mark.get(op.reads[s])) is not None and a in contracted[s]
        ]
        if ends_here:
            whose = op.reads[ends_here[0]] if mark is division.expert else out
            moved[-1] += flow.program.bytes_of(whose)
        elif (place := next((p for p in places if p is not None), None)) is not None:
            mark[out] = place


def _weights_product(
    flow: Flow, division: Division, op: Operator, side: int, *, large: bool
) -> None:
    contracted, batch = op.params["dimension_numbers"]
    weight, data, (out,) = op.reads[side], op.reads[1 - side], op.writes
    if batch[side]:
        axis = batch[side][0]
        if data not in division.expert:
            division.exchanged[-1] += flow.program.bytes_of(data)
        division.experts[-1] = max(division.experts[-1], float(flow.program.shape(weight)[axis]))
        division.expert_weights.add(weight)
        division.expert[out] = 0
        return
    for mark in (division.expert, division.tensor):
        if (place := _place(flow, op, 1 - side, mark.get(data))) is not None:
            mark[out] = place
    divided = division.tensor.get(data)
    if divided is not None and divided in contracted[1 - side]:
        division.weights.add(weight)
        division.reduced[-1] += flow.program.bytes_of(out)
    elif large and divided is None and data not in division.expert:
        shape = flow.program.shape(weight)
        free = [d for d in range(len(shape)) if d not in contracted[side] and shape[d] > 1]
        if free:
            division.weights.add(weight)
            place = _place(flow, op, side, free[0])
            if place is not None:
                division.tensor[out] = place


def _place(flow: Flow, op: Operator, side: int, axis: Axis) -> Axis:
    """Return the place of an operand's axis in a product's result.

    If it is contracted, return None.
    """
    contracted, batch = op.params["dimension_numbers"]
    if axis is None or axis in contracted[side]:
        return None
    if axis in batch[side]:
        return int(batch[side].index(axis))
    taken = (*contracted[side], *batch[side])
    free = [d for d in range(len(flow.program.shape(op.reads[side]))) if d not in taken]
    before = len(batch[0])
    if side == 1:
        left = (*contracted[0], *batch[0])
        before += len(flow.program.shape(op.reads[0])) - len(left)
    return before + free.index(axis)


def _convolution(flow: Flow, division: Division, op: Operator, *, large: bool) -> None:
    numbers = op.params["dimension_numbers"]
    data, kernel, (out,) = op.reads[0], op.reads[1], op.writes
    if not _is_weight(flow, kernel):
        _other(flow, division, op)
        return
    (_, channel, *space), divided = numbers.lhs_spec, division.tensor.get(data)
    grouped = op.params["feature_group_count"] > 1
    if divided == channel and not grouped:
        division.weights.add(kernel)
        division.reduced[-1] += flow.program.bytes_of(out)
    elif divided in space:
        division.tensor[out] = numbers.out_spec[2 + space.index(divided)]
    elif divided == channel or large:
        division.weights.add(kernel)
        division.tensor[out] = numbers.out_spec[1]


def _other(flow: Flow, division: Division, op: Operator) -> None:
    """Follow marks through operators other than products, and gather what cannot be followed."""
    program = flow.program
    if op.name == "gather" and _is_weight(
        flow, op.reads[0]
    ):  # a look-up: rows are divided and all-reduced
        division.weights.add(op.reads[0])
        division.limit[-1] = min(division.limit[-1], float(program.shape(op.reads[0])[0]))
        division.reduced[-1] += program.bytes_of(op.writes[0])
        return
    if len(op.writes) != 1 and op.name not in ("split",):
        marked = [v for v in op.reads if v in division.tensor]
        division.reduced[-1] += sum(program.bytes_of(v) for v in marked) / 2
        return
    for mark in (division.expert, division.tensor):
        marked = [v for v in op.reads if v in mark]
        if not marked:
            continue
        for out in op.writes:
            shapes: tuple[Any, Any] = (program.shape(marked[0]), program.shape(out))
            axis, summed = follow_axis(op.name, op.params, mark[marked[0]], *shapes)
            if axis is not None:
                mark[out] = axis
            elif mark is division.tensor:
                whole = program.bytes_of(out) if summed else program.bytes_of(marked[0]) / 2
                division.reduced[-1] += whole
