"""Buddy blocks and layouts."""

from __future__ import annotations

import itertools

import pytest

from tessera.solvers.placement.blocks import (
    block_waste,
    carve_share,
    indices_of,
    mask_of,
    maximal_blocks,
)
from tessera.solvers.placement.free import Layout, list_layouts


def free_mask(*indices: int) -> int:
    return mask_of(indices)


def test_a_mask_falls_into_maximal_aligned_blocks() -> None:
    assert maximal_blocks(free_mask(0, 1, 2, 3, 6, 7)) == ((4, 0), (2, 6))
    assert maximal_blocks(free_mask(1, 2, 3)) == ((2, 2), (1, 1))
    assert maximal_blocks(free_mask(0, 1, 2, 3, 4, 5)) == ((4, 0), (2, 4))
    assert maximal_blocks(0) == ()


def test_a_share_takes_the_tightest_block() -> None:
    assert carve_share(free_mask(0, 1, 2, 3, 6, 7), 2) == free_mask(6, 7)
    assert carve_share(free_mask(0, 1, 2, 3, 6, 7), 1) == free_mask(6)


def test_a_share_that_is_no_power_of_two_is_made_of_its_binary_blocks() -> None:
    assert carve_share(free_mask(0, 1, 4, 5, 6, 7), 6) == free_mask(0, 1, 4, 5, 6, 7)
    assert carve_share(free_mask(0, 1, 2, 4, 5, 7), 6) == 0
    assert indices_of(carve_share(free_mask(*range(8)), 6)) == (0, 1, 2, 3, 4, 5)
    assert carve_share(free_mask(0, 1, 2), 3) == free_mask(0, 1, 2)
    assert carve_share(free_mask(1, 2, 3), 3) == free_mask(1, 2, 3)


def test_an_unaligned_share_takes_any_gpus() -> None:
    assert carve_share(free_mask(1, 2, 5), 2, False) == free_mask(1, 2)
    assert carve_share(free_mask(1, 2, 5), 4, False) == 0


def test_a_share_fits_if_disjoint_blocks_for_it_exist() -> None:
    def fits(left: int, sizes: tuple[int, ...]) -> bool:
        if not sizes:
            return True
        size, *others = sizes
        return any(
            fits(left & ~block, tuple(others))
            for first in range(0, 8, size)
            if left & (block := ((1 << size) - 1) << first) == block
        )

    for mask, gpus in itertools.product(range(1, 256), range(1, 9)):
        sizes = tuple(1 << k for k in reversed(range(4)) if gpus >> k & 1)
        taken = carve_share(mask, gpus)
        assert bool(taken) == fits(mask, sizes)
        assert taken & ~mask == 0
        assert taken.bit_count() in (0, gpus)


def test_splitting_a_large_block_wastes_more_than_an_exact_fit() -> None:
    assert block_waste(free_mask(0, 1), free_mask(0, 1)) < block_waste(
        free_mask(0, 1, 2, 3), free_mask(0, 1)
    )


@pytest.mark.parametrize(
    ("gpus", "sizes", "best"),
    [
        (4, (8,), Layout(0, 0, 4)),
        (8, (8,), Layout(0, 0, 8)),
        (24, (8,), Layout(3, 8, 0, whole=True)),
        (40, (8,), Layout(5, 8, 0, whole=True)),
        (48, (8,), Layout(6, 8, 0, whole=True)),
        (24, (16,), Layout(1, 16, 8, whole=True)),
        (20, (6,), Layout(3, 6, 2, whole=True)),
        (12, (8, 4), Layout(1, 8, 4, whole=True)),
    ],
)
def test_the_best_layout_is_whole_nodes_and_a_remainder(
    gpus: int, sizes: tuple[int, ...], best: Layout
) -> None:
    assert list_layouts(gpus, sizes)[0] == best


def test_worse_layouts_are_equal_powers_of_two_larger_first() -> None:
    assert list_layouts(24, (16,))[1:] == [
        Layout(3, 8, 0),
        Layout(6, 4, 0),
        Layout(12, 2, 0),
        Layout(24, 1, 0),
    ]
    assert list_layouts(6, (8,))[1:] == [Layout(3, 2, 0), Layout(6, 1, 0)]
