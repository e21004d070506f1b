"""The order in which sizes are measured, so that an early stop leaves the most useful ones.

Between measured sizes, times are interpolated. Beyond them, they are extrapolated, which is less
certain. So the smallest and the largest size of each tensor degree come first, and then the middle
of the widest gap, in logarithms. This needs no JAX.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from math import log2
from typing import Final

Size = tuple[int, int]
"""Samples on one device, with a tensor degree."""

MIN_USABLE_SIZES: Final = 2
"""Number of sizes of a tensor degree from which an interrupted profile is used. A single one does
not show how times grow with the number of samples."""


class SizeOrder:
    """The sizes that are left to measure, with those that were measured or are too large."""

    def __init__(self, sizes: Iterable[Size]) -> None:
        self._left: dict[int, list[int]] = defaultdict(list)
        for samples, tp in sorted(set(sizes)):
            self._left[tp].append(samples)
        self._done: dict[int, list[int]] = defaultdict(list)
        self._large: dict[int, list[int]] = defaultdict(list)

    def next_size(self) -> Size | None:
        """Return the size to measure next, or None if nothing is left."""
        for tp in sorted(self._left):
            if (samples := self._outer(tp)) is not None:
                return samples, tp
        gaps = [self._widest_gap(tp) for tp in sorted(self._left) if self._left[tp]]
        if not gaps:
            return None
        _, samples, tp = max(gaps, key=lambda gap: gap[0])
        return samples, tp

    def finish(self, size: Size) -> None:
        """Note that all layers were measured at ``size``."""
        samples, tp = size
        self._left[tp].remove(samples)
        self._done[tp] = sorted([*self._done[tp], samples])

    def drop(self, size: Size) -> None:
        """Note that ``size`` needs more memory than there is. Larger ones of its degree do, too."""
        samples, tp = size
        self._large[tp] += [s for s in self._left[tp] if s >= samples]
        self._left[tp] = [s for s in self._left[tp] if s < samples]

    def usable_sizes(self) -> list[Size]:
        """Return the measured sizes that estimates may use, by degree and samples."""
        return [
            (samples, tp)
            for tp in sorted(self._done)
            for samples in self._done[tp]
            if len(self._done[tp]) >= MIN_USABLE_SIZES or not self._left[tp]
        ]

    def unusable_sizes(self) -> list[Size]:
        """Return the sizes that fit as far as is known, but that estimates may not use."""
        usable = set(self.usable_sizes())
        known = {tp: sorted(self._left[tp] + self._done[tp]) for tp in sorted(self._left)}
        return [(s, tp) for tp, each in known.items() for s in each if (s, tp) not in usable]

    def too_large(self) -> list[Size]:
        """Return the sizes that need too much memory, by degree and samples."""
        return [(s, tp) for tp in sorted(self._large) for s in sorted(self._large[tp])]

    def _outer(self, tp: int) -> int | None:
        """Return the size of a degree that widens the measured range most, or None."""
        left, done = self._left[tp], self._done[tp]
        if not done:
            return left[0] if left else None
        beyond = [s for s in left if s > done[-1]]
        if not beyond:
            return None
        if not self._large[tp]:
            return beyond[-1]
        return _middle(beyond, done[-1], min(self._large[tp]))

    def _widest_gap(self, tp: int) -> tuple[float, int, int]:
        """Return the width of a degree's widest gap, and the size in its middle."""
        left, done = self._left[tp], self._done[tp]
        gaps = []
        for low, high in pairwise(done):
            if inside := [s for s in left if low < s < high]:
                gaps.append((log2(high / low), _middle(inside, low, high), tp))
        return max(gaps, key=lambda gap: gap[0])


def _middle(sizes: Iterable[int], low: int, high: int) -> int:
    """Return the size next to the geometric mean of two others, the smaller one of two."""
    mean = (log2(low) + log2(high)) / 2
    return min(sizes, key=lambda s: (abs(log2(s) - mean), s))
