"""Cuts of a chain of operators into layers: between products, at the narrowest live set."""

from __future__ import annotations

import hashlib
from itertools import pairwise

from tessera.estimator.programs.counts import HEAVY_PRIMITIVES
from tessera.estimator.programs.flow import Flow
from tessera.estimator.programs.program import Operator

LONG_CHAIN_PRODUCTS = 12
"""Largest number of products between two cuts before cuts at narrow places are added. Attention has
6 products, and a T5 block has 14."""

MAX_WIDTH_RATIO = 1.1
"""Largest width of a cut at a narrow place, relative to the narrowest place."""


def ends_of(flow: Flow, ending: frozenset[str] = frozenset()) -> list[int]:
    """Return the ends of layers, as exclusive positions in ``flow.active``. The last is its length.

    Between one product (or table look-up) and the next, the cut is at the earliest place with the
    fewest live bytes. It moves behind operators named in ``ending`` (activations) if it stays as
    narrow. A cut is kept only where a single value is live. Inside a residual block, the input of
    the block is also live, so blocks remain whole. A long chain of products without such a place (a
    decoder that reads an encoder's memory) is cut at its narrowest places.
    """
    live = _live(flow)
    heavy = [p for p, i in enumerate(flow.active) if _is_heavy(flow, flow.program.operators[i])]
    names = [flow.program.operators[i].name for i in flow.active]
    # Move cuts behind activations that belong to the previous layer.
    places = [min(range(a, b), key=lambda p: (live[p][0], p)) for a, b in pairwise(heavy)]
    for n, stop in enumerate(heavy[1:]):
        while (
            (after := places[n] + 1) < stop
            and names[after] in ending
            and live[after][0] == live[after - 1][0]
        ):
            places[n] = after
    widths = [live[p][0] for p in places]
    single = [i for i, p in enumerate(places) if live[p][1] == 1 and not _bulges(widths, i)]
    chosen = list(single)
    # Long stretches without a kept cut are cut at their narrowest places.
    for a, b in zip([-1, *single], [*single, len(places)], strict=True):
        inside = [i for i in range(a + 1, b) if widths[i] > 0]
        if b - a > LONG_CHAIN_PRODUCTS and inside:
            narrowest = min(widths[i] for i in inside)
            chosen += [i for i in inside if widths[i] <= MAX_WIDTH_RATIO * narrowest]
    return [*sorted(places[i] + 1 for i in chosen), len(flow.active)]


def _bulges(widths: list[float], i: int) -> bool:
    """Return whether a place is wider than its neighbours, of which there is one at an end."""
    neighbours = [*widths[max(0, i - 1) : i], *widths[i + 1 : i + 2]]
    return bool(neighbours) and all(widths[i] > other for other in neighbours)


def _live(flow: Flow) -> list[tuple[float, int]]:
    """Return the bytes and the number of activations live after each active operator."""
    alive: set[int] = set()
    width, lives = 0.0, []
    dying: dict[int, list[int]] = {}
    for position, index in enumerate(flow.active):
        for out in flow.program.operators[index].writes:
            value = flow.root[out]
            if value in alive or not flow.activation(out) or flow.last_read[value] <= position:
                continue
            alive.add(value)
            width += flow.program.bytes_of(value)
            dying.setdefault(flow.last_read[value], []).append(value)
        for value in dying.pop(position, []):
            alive.discard(value)
            width -= flow.program.bytes_of(value)
        lives.append((max(0.0, width), len(alive)))
    return lives


def _is_heavy(flow: Flow, op: Operator) -> bool:
    if op.name == "gather":  # a look-up of samples in a table of weights
        return bool(flow.sources.get(op.reads[0])) and flow.from_batch[op.reads[1]]
    return op.name in HEAVY_PRIMITIVES


def kind_of(flow: Flow, start: int, end: int) -> str:
    """Return a name that is the same for layers with the same operators at the same shapes.

    Values of the batch itself have no gradient and therefore differ from values of a layer.
    """
    digest = hashlib.sha256()
    busiest, most = "gather", 0.0
    for index in flow.active[start:end]:
        op = flow.program.operators[index]
        shapes = [
            (flow.program.shape(v), flow.program.values[v].dtype, flow.activation(v))
            for v in (*op.reads, *op.writes)
        ]
        digest.update(repr((op.name, shapes, op.flops)).encode())
        if op.flops > most and op.name in HEAVY_PRIMITIVES:
            busiest, most = op.name, op.flops
    return f"{busiest.partition('_')[0]}-{digest.hexdigest()[:10]}"
