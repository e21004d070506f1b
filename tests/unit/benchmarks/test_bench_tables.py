"""Printed tables of results with many columns."""

from __future__ import annotations

from tessera.benchmarks.harness.command import table_blocks


def test_columns_that_do_not_fit_go_into_another_table_with_the_first_column() -> None:
    rows = [
        {"policy": "fcfs", "a": 1.0, "b": "x" * 10},
        {"policy": "arena", "a": 12345.678, "c": 2},
    ]
    # column policy needs 8 characters, a 10 (1.23e+04), b 12, c 3
    assert table_blocks(rows, 100) == [["policy", "a", "b", "c"]]
    assert table_blocks(rows, 30) == [["policy", "a", "b"], ["policy", "c"]]
    assert table_blocks(rows, 29) == [["policy", "a"], ["policy", "b", "c"]]


def test_a_column_wider_than_the_screen_is_still_printed() -> None:
    assert table_blocks([{"policy": "x" * 50, "a": "y" * 50, "b": 1}], 20) == [
        ["policy", "a"],
        ["policy", "b"],
    ]
