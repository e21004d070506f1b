"""Dynamic programming along a chain of layers: tables of the least cost of the rest of a plan.

A state is (stages left, first layer left, GPUs left). A stage leads from one state to another by
covering layers and GPUs. Tables have shape (stages + 1, layers + 1, GPUs + 1). An entry is ``inf``
if no plan leads from there to the end with all GPUs used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.estimator.planning.options import NoPlan, StageOptions
from tessera.formulation.base.cancellation import never_cancelled, require_caller
from tessera.formulation.base.tables import Floats, Ints

Fold = Callable[[Floats, Floats], Floats]
"""The combination of stages: ``np.add`` for values that add up, ``np.maximum`` for the greatest."""


def dense_columns(options: StageOptions, value: Floats, sizes: Ints) -> Floats:
    """Return the least value of any option by GPUs, start and end.

    ``value`` has shape (C, K), and its C columns are treated alike. The result has shape (C, sizes,
    layers, layers + 1).
    """
    layers = options.layers
    columns = len(value)
    at = np.searchsorted(sizes, options.gpus) * layers + options.start
    at = at * (layers + 1) + options.end
    out = np.full((columns, len(sizes) * layers * (layers + 1)), np.inf)
    for column, row in zip(out, value, strict=True):
        np.minimum.at(column, at, row)
    return out.reshape(columns, len(sizes), layers, layers + 1)


def suffix_tables(
    options: StageOptions,
    value: Floats,
    fold: Fold,
    stages: int,
    gpus: int,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Floats:
    """Return the least cost of the rest, shape (C, stages + 1, layers + 1, gpus + 1).

    ``value`` has shape (C, K). A stage with j stages from it to the end, including itself, only
    uses options with depth >= j.
    """
    sizes = options.sizes[options.sizes <= gpus]
    usable = options.only(options.gpus <= gpus) if len(sizes) < len(options.sizes) else options
    column = value[:, options.gpus <= gpus]
    out = np.full((len(value), stages + 1, options.layers + 1, gpus + 1), np.inf)
    out[:, 0, options.layers, 0] = 0.0
    bound_by_memory = bool((usable.depth < stages).any())
    table = dense_columns(usable, column, sizes)
    for j in range(1, min(stages, options.layers) + 1):
        require_caller(cancelled)
        if bound_by_memory:
            fits = usable.depth >= j
            table = dense_columns(usable.only(fits), column[:, fits], sizes)
        _one_more(table, out[:, j - 1], sizes, fold, j, out[:, j])
    return out


def _one_more(
    table: Floats, rest: Floats, sizes: Ints, fold: Fold, stages: int, best: Floats
) -> None:
    """Lower ``best``, the table of ``stages`` stages, by one stage before each state of ``rest``.

    Each stage has at least one layer. The first stage must therefore leave ``stages - 1`` layers.
    """
    layers, gpus = rest.shape[1] - 1, rest.shape[2] - 1
    starts = slice(0, layers - stages + 1)
    ends = slice(1, layers - stages + 2) if stages > 1 else slice(layers, layers + 1)
    for p, size in enumerate(sizes):
        after = rest[:, None, ends, : gpus + 1 - size]
        least = fold(table[:, p, starts, ends, None], after).min(axis=2)
        lowered = best[:, starts, size:]
        np.minimum(lowered, least, out=lowered)


def walk_plan(options: StageOptions, value: Floats, rest: Floats, stages: int, gpus: int) -> Ints:
    """Return the options of a plan with the least sum, in order.

    ``value`` has shape (K,). ``rest`` is the result of ``suffix_tables`` for one column with
    ``np.add``.

    Raises:
        NoPlan: no plan exists.
    """
    if not np.isfinite(rest[stages, 0, gpus]):
        raise NoPlan(
            f"no plan with {stages} stages fits on {gpus} GPUs; use more layers, more memory, or other"
            " numbers of stages and GPUs"
        )
    rows, layer, left = [], 0, gpus
    for j in range(stages, 0, -1):
        low, high = np.searchsorted(options.start, [layer, layer + 1])
        here = np.arange(low, high)
        here = here[(options.gpus[here] <= left) & (options.depth[here] >= j)]
        total = value[here] + rest[j - 1, options.end[here], left - options.gpus[here]]
        row = int(here[int(total.argmin())])
        rows.append(row)
        layer, left = int(options.end[row]), left - int(options.gpus[row])
    return np.array(rows, dtype=np.int64)
