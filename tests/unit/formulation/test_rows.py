"""Rows by kind and subject, and their names in prices and reasons."""

from __future__ import annotations

import pytest

from tessera.formulation.problem import CouplingRow, RowKind


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (CouplingRow(kind=RowKind.GPUS, subject="a100", capacity=4), "gpus/a100"),
        (
            CouplingRow(kind=RowKind.QUOTA, subject="research/a100", capacity=4),
            "quota/research/a100",
        ),
        (CouplingRow(kind=RowKind.KEPT, subject="research", capacity=4), "kept for/research"),
        (CouplingRow(kind=RowKind.CHANGES, capacity=4), "changes"),
    ],
)
def test_a_row_and_its_name_are_equivalent(row: CouplingRow, name: str) -> None:
    assert row.name == name
    assert CouplingRow.from_name(name, 4) == row


def test_a_name_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a valid RowKind"):
        CouplingRow.from_name("rooms/a100", 4)
