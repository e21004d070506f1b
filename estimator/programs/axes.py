"""The position of a divided axis after operators that are not products."""

from __future__ import annotations

import math
from typing import Any

from tessera.estimator.programs.counts import is_reduction

Dims = tuple[int, ...]


def follow_axis(
    name: str, params: dict[str, Any], axis: int, shape: Dims, out: Dims
) -> tuple[int | None, bool]:
    """Return the position of the axis in the result, and whether parts are summed.

    If the result is whole, the position is None. ``shape`` is that of the operand, which is divided
    along ``axis``.
    """
    if name in ("transpose", "permuted"):
        return int(params["permutation"].index(axis)), False
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][axis]), False
    if name in ("headed", "headed_clone"):
        return (1 if axis == len(shape) - 1 else None), False
    if name == "expanded":
        return axis + len(out) - len(shape), False
    if name in ("reshape",):
        return reshape_axis(axis, shape, out), False
    if name == "squeeze" or is_reduction(name):
        gone = params["dimensions"] if name == "squeeze" else params["axes"]
        if axis in gone:
            return None, name != "squeeze"
        return axis - sum(d < axis for d in gone), False
    if name == "expand_dims":
        return axis + sum(d <= axis for d in params["dimensions"]), False
    if name in (
        "gather",
        "pick",
        "dynamic_slice",
        "scatter",
        "scatter-add",
        "scatter_add",
        "sort",
        "top_k",
    ):
        return (axis, False) if shape == out else (None, True)
    if len(shape) != len(out):
        return None, False
    if name.startswith("cum") and params.get("axis") == axis:
        return None, False
    if name == "concatenate" and params["dimension"] == axis:
        return None, False
    # The other operators are element-wise, or slices whose parts are laid out to be local.
    return axis, False


def reshape_axis(axis: int, shape: Dims, out: Dims) -> int | None:
    """Return the axis after a reshape, or None if it is lost.

    A split axis becomes the first of its parts. A merged axis is kept if it is the leading one.
    """
    before = math.prod(shape[:axis])
    seen = 1
    for place, size in enumerate(out):
        if seen == before and size > 1:
            return place
        seen *= size
    return None
