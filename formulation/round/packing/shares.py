"""The ways in which a gang may be divided into shares, one for each of its nodes.

They are the shapes that ``tessera.formulation.answer.check`` accepts: equal shares, whole nodes and one
smaller share, or, if the GPU count does not divide by the nodes, equal shares except for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

Sizes = tuple[int, ...]
"""The different numbers of GPUs that the nodes of a type have, rising."""

MAX_NODE_GPUS: Final = 16
"""GPUs of the largest node for which there are packing rows.

Such a node can be filled in 231 ways, and the number grows exponentially."""


@lru_cache(maxsize=1 << 14)
def shares_of(gpus: int, nodes: int, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """Return the ways to divide ``gpus`` GPUs among ``nodes`` nodes of these sizes.

    Each way has one share for each node, largest first. No way is named twice.
    """
    if not sizes or not 1 <= nodes <= gpus:
        return ()
    ways = {
        tuple(sorted(way, reverse=True))
        for way in (*_nearly_equal(gpus, nodes), *_whole_nodes(gpus, nodes, sizes))
    }
    return tuple(sorted(way for way in ways if way[0] <= sizes[-1]))


def _nearly_equal(gpus: int, nodes: int) -> Iterator[tuple[int, ...]]:
    """Yield equal shares; or, if they do not divide, equal shares except for one."""
    if gpus % nodes == 0:
        yield (gpus // nodes,) * nodes
        return
    for each in range(1, (gpus - 1) // (nodes - 1) + 1):
        yield (*(each,) * (nodes - 1), gpus - each * (nodes - 1))


def _whole_nodes(gpus: int, nodes: int, sizes: Sizes) -> Iterator[tuple[int, ...]]:
    """Yield sets of whole nodes with at most one share that is not a whole node."""
    for whole in _sums(nodes, gpus, sizes):
        yield whole
    for rest in range(1, min(gpus, sizes[-1]) + 1):
        for whole in _sums(nodes - 1, gpus - rest, sizes):
            yield (*whole, rest)


def _sums(count: int, total: int, sizes: Sizes) -> Iterator[tuple[int, ...]]:
    """Yield the multisets of ``count`` sizes that add up to ``total``."""
    if count == 0 or not sizes:
        if count == 0 and total == 0:
            yield ()
        return
    *smaller, size = sizes
    if not count * sizes[0] <= total <= count * size:
        return
    for own in range(min(count, total // size), -1, -1):
        for rest in _sums(count - own, total - own * size, tuple(smaller)):
            yield (*(size,) * own, *rest)


def leaves_gaps(gpus: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether gangs of these sizes may leave gaps on nodes, although their counts suffice.

    They do not if each share of a node divides all larger ones and all nodes that can hold it.
    """
    top = max(sizes, default=0)
    shares = sorted({count if count <= top else count % top or top for count in gpus})
    steps = pairwise(shares)
    return any(large % small for small, large in steps) or any(
        size % share for share in shares for size in sizes if size >= share
    )


def least_weight(gpus: int, nodes: int, sizes: Sizes, weight: tuple[int, ...]) -> int:
    """Return the least weight of the shares of a gang on ``nodes`` nodes.

    ``weight[s]`` is that of a share of s GPUs. It is 0 if the gang cannot be on that many nodes.
    """
    ways = shares_of(gpus, nodes, sizes)
    return min((sum(weight[share] for share in way) for way in ways), default=0)


def most_weight(size: int, weight: tuple[int, ...]) -> int:
    """Return the greatest weight of shares that fit together on a node of ``size`` GPUs.

    It is an unbounded knapsack, solved by a dynamic program over GPUs.
    """
    best = [0] * (size + 1)
    for gpus in range(1, size + 1):
        best[gpus] = max(best[gpus - share] + weight[share] for share in range(1, gpus + 1))
        best[gpus] = max(best[gpus], best[gpus - 1])
    return best[size]
