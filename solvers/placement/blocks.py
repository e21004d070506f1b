"""Buddy blocks: the GPUs of one node that a share takes, as bit masks (bit i is GPU i)."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1 << 14)
def mask_of(indices: tuple[int, ...]) -> int:
    """Return the mask of these GPU indices."""
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask


@lru_cache(maxsize=1 << 14)
def indices_of(mask: int) -> tuple[int, ...]:
    """Return the GPU indices of ``mask``, rising."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


@lru_cache(maxsize=1 << 16)
def maximal_blocks(mask: int) -> tuple[tuple[int, int], ...]:
    """Return the maximal aligned blocks in ``mask`` as (size, first GPU), largest first.

    A block of size 2^k starts at a multiple of 2^k. The blocks are disjoint and make up ``mask``.
    """
    parts = []
    size = 1 << max(0, mask.bit_length() - 1).bit_length()
    while mask:
        for first in range(0, mask.bit_length(), size):
            block = ((1 << size) - 1) << first
            if mask & block == block:
                parts.append((size, first))
                mask ^= block
        size //= 2
    return tuple(parts)


@lru_cache(maxsize=1 << 16)
def block_signature(mask: int) -> tuple[int, ...]:
    """Return the sizes of the maximal blocks, largest first; they alone decide what fits."""
    return tuple(size for size, _ in maximal_blocks(mask))


@lru_cache(maxsize=1 << 16)
def carve_share(mask: int, gpus: int, aligned: bool = True) -> int:
    """Return the GPUs of ``mask`` that a share of ``gpus`` takes; 0 if it does not fit.

    The share is split into its binary blocks (6 = 4 + 2). Each, largest first, takes the tightest
    free block. Because block sizes divide one another, this finds room wherever there is room. If
    not ``aligned``, the share takes any GPUs, lowest first.
    """
    if gpus > mask.bit_count():
        return 0
    if not aligned:
        return mask_of(indices_of(mask)[:gpus])
    taken = 0
    for k in reversed(range(gpus.bit_length())):
        piece = 1 << k
        if not gpus & piece:
            continue
        fitting = [(size, first) for size, first in maximal_blocks(mask & ~taken) if size >= piece]
        if not fitting:
            return 0
        taken |= ((1 << piece) - 1) << min(fitting)[1]
    return taken


@lru_cache(maxsize=1 << 16)
def block_waste(mask: int, taken: int) -> int:
    """Return the amount of room for large blocks that taking ``taken`` from ``mask`` destroys.

    The best fit destroys least. Room is the sum of squared block sizes: an exact fit of 2 costs 4,
    and splitting a block of 4 costs 12.
    """
    return sum(s * s for s in block_signature(mask)) - sum(
        s * s for s in block_signature(mask & ~taken)
    )
