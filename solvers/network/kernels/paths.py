"""The loops that choose paths, bundle by bundle; all candidates of a bundle are scored."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

Paths: TypeAlias = tuple[Ints, Ints, Ints, Ints, Floats]
"""candidate_start (B + 1,), candidate (C,), path_start (P + 1,), path_link, and seconds per byte of
each link (E,)."""

TIE = 1e-12
"""Loads that differ by less than this are equal.

The same shares summed in another order differ in the last bits."""


@compile_lazily
def _shift(paths: Paths, bundle: int, place: int, rate: float, load: Floats) -> None:
    """Add the load of the bundle at ``rate`` bytes/s to the links of its candidate ``place``."""
    candidate_start, candidate, path_start, path_link, inverse = paths
    p = candidate[candidate_start[bundle] + place]
    for k in range(path_start[p], path_start[p + 1]):
        load[path_link[k]] += rate * inverse[path_link[k]]


@compile_lazily
def _least_congested(paths: Paths, bundle: int, rate: float, load: Floats) -> int:
    """Return the candidate with the least congestion when the bundle is on it.

    Candidates are compared by the largest load of their links, then by the sum, then by their
    number.
    """
    candidate_start, candidate, path_start, path_link, inverse = paths
    most, total, lowest, place = np.inf, np.inf, -1, 0
    for c in range(candidate_start[bundle], candidate_start[bundle + 1]):
        p = candidate[c]
        peak, added = 0.0, 0.0
        for k in range(path_start[p], path_start[p + 1]):
            share = load[path_link[k]] + rate * inverse[path_link[k]]
            peak = max(peak, share)
            added += share
            if peak > most + TIE:
                break
        if peak > most + TIE:
            continue
        closer = peak < most - TIE or added < total - TIE
        if closer or (added <= total + TIE and p < lowest):
            most, total, lowest, place = peak, added, p, c - candidate_start[bundle]
    return place


@compile_lazily
def place_bundles(turn: Ints, rate: Floats, paths: Paths, load: Floats, chosen: Ints) -> None:
    """Give each bundle of ``turn``, in that order, its least congested candidate.

    ``load`` (E,) is updated; it is a share of each link's time. ``rate`` (B,) is the bytes/s that a
    bundle offers.
    """
    for bundle in turn:
        chosen[bundle] = _least_congested(paths, bundle, rate[bundle], load)
        _shift(paths, bundle, chosen[bundle], rate[bundle], load)
