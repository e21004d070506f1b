"""The order of samples: a function of the seed and the iteration, and of nothing else.

An epoch is a permutation of all samples, which is computed where it is needed (a Feistel network
with cycle walking: Black and Rogaway, CT-RSA 2002, section 4). So a data set may have any size, and
a checkpoint needs to know nothing about the data but the number of iterations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

ROUNDS: Final = 6
"""Rounds of the network. Four already make it a pseudo-random permutation (Luby and Rackoff, 1988)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The order in which ``samples`` samples are used, ``batch`` of them in each iteration.

    Each sample is used once in an epoch. An iteration may hold the end of an epoch and the beginning
    of the next one.
    """

    samples: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        """Check that there is something to use. Raises ValueError."""
        if self.samples < 1 or self.batch < 1:
            raise ValueError("samples and batch must be at least 1")

    def samples_of(self, iteration: int) -> Ints:
        """Return the samples of an iteration in their order, of shape (batch,)."""
        places = np.arange(iteration * self.batch, (iteration + 1) * self.batch, dtype=np.int64)
        epochs, within = np.divmod(places, self.samples)
        found = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found[chosen] = permute(within[chosen], self.samples, (self.seed, epoch))
        return found


def permute(values: Ints, size: int, key: tuple[int, int]) -> Ints:
    """Return where a permutation of 0 to ``size - 1`` puts these values, of the same shape.

    The permutation follows from ``key``, a seed and an epoch.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    words = _encrypt(values.astype(np.uint64), half, keys)
    while (outside := words >= size).any():
        words[outside] = _encrypt(words[outside], half, keys)
    return words.astype(np.int64)


def _encrypt(words: _Words, half: int, keys: _Words) -> _Words:
    """Return words of ``2 * half`` bits, permuted by a Feistel network."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = words >> shift, words & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(words: _Words) -> _Words:
    """Return words whose bits each depend on all bits (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
