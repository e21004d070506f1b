"""Patterns of names: only the asterisk is special."""

from __future__ import annotations

import fnmatch

import numpy as np
import pytest

from tessera.formulation.access import matches_pattern


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("node", "node", True),
        ("node", "node-1", False),
        ("node", "Node", False),
        ("*", "", True),
        ("*", "anything", True),
        ("a*", "ba", False),
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("*b*", "abc", True),
        ("a*b*c", "a-c-b", False),
        ("a?c", "abc", False),
        ("[ab]", "a", False),
        ("a.c", "abc", False),
        ("**", "x", True),
        ("", "", True),
        ("", "x", False),
        ("a*", "a\nb", True),
    ],
)
def test_only_an_asterisk_stands_for_any_text(pattern: str, name: str, expected: bool) -> None:
    assert matches_pattern(pattern, name) is expected


def test_patterns_match_as_those_of_files_do() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5_000):
        pattern = "".join(rng.choice(list("ab*"), rng.integers(8)))
        name = "".join(rng.choice(list("ab"), rng.integers(10)))
        assert matches_pattern(pattern, name) is fnmatch.fnmatchcase(name, pattern)


def test_a_pattern_of_many_asterisks_is_refused_without_trying_all_ways() -> None:
    assert not matches_pattern("*a" * 5_000 + "*b", "a" * 20_000)
