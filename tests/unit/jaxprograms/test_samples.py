"""The order of samples is a permutation in each epoch, of any size, and follows from the seed."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.jax.samples import SampleOrder, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 1000, 4097])
def test_a_permutation_uses_each_sample_once(size: int) -> None:
    for epoch in range(3):
        permuted = permute(np.arange(size), size, (7, epoch))
        assert sorted(permuted.tolist()) == list(range(size))


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    keys = [(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    orders = {tuple(permute(np.arange(100), 100, key).tolist()) for key in keys}
    assert len(orders) == len(keys)
    assert tuple(range(100)) not in orders


@pytest.mark.parametrize(("samples", "batch", "iterations"), [(10, 4, 5), (3, 7, 6)])
def test_iterations_use_each_sample_once_in_an_epoch_even_across_its_end(
    samples: int, batch: int, iterations: int
) -> None:
    order = SampleOrder(samples=samples, batch=batch, seed=3)
    order.samples_of(77)  # what was asked before does not matter
    used = np.concatenate([order.samples_of(k) for k in range(iterations)]).tolist()
    epochs = [used[k : k + samples] for k in range(0, len(used) - samples + 1, samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_data_set_of_a_trillion_samples_needs_no_list_of_them() -> None:
    size = 10**12
    used = SampleOrder(samples=size, batch=1000, seed=5).samples_of(123_456)
    assert len(set(used.tolist())) == 1000
    assert used.min() >= 0
    assert used.max() < size
    eighths = np.bincount(used * 8 // size, minlength=8)
    assert eighths.min() > 60, "the samples of a batch must come from everywhere"


def test_neighbours_are_not_used_together() -> None:
    size = 1 << 16
    permuted = permute(np.arange(4096), size, (1, 0))
    assert np.mean(np.abs(np.diff(permuted)) < 16) < 0.01


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (1, 0)])
def test_an_order_of_nothing_is_refused(samples: int, batch: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SampleOrder(samples=samples, batch=batch, seed=0)
