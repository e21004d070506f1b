"""Patterns of names, labels of nodes, and the selectors that jobs state of them."""

from __future__ import annotations

import fnmatch

import numpy as np
import pytest

from tessera.formulation.base.access import matches_pattern
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.selectors import Selector, require_node_labels
from tessera.formulation.state.permissions import match_selectors


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


LABELS = [
    {"zone": "a", "disk": "ssd"},
    {"zone": "b", "disk": "nvme", "owner": "lab"},
    {"zone": "a"},
    {},
]


@pytest.mark.parametrize(
    ("text", "matching", "form"),
    [
        ("", [0, 1, 2, 3], ""),
        ("zone=a", [0, 2], "zone=a"),
        (" zone = a ,disk in(ssd,nvme)", [0], "zone=a, disk in (nvme, ssd)"),
        ("zone!=a", [1, 3], "zone!=a"),
        ("owner!=lab,owner!=lab", [0, 2, 3], "owner!=lab"),
        ("disk in (ssd)", [0], "disk=ssd"),
        ("zone=A", [], "zone=A"),
        ("inner=1", [], "inner=1"),
    ],
)
def test_a_selector_matches_the_nodes_that_meet_all_its_requirements(
    text: str, matching: list[int], form: str
) -> None:
    selector = Selector.read("f", text)
    assert [n for n, labels in enumerate(LABELS) if selector.matches(labels)] == matching
    assert str(selector) == form
    assert Selector.read("f", form) == selector


def test_the_table_of_unmatched_nodes_agrees_with_each_selector() -> None:
    texts = ["zone=a", "zone!=a, disk in (ssd, nvme)", "", "owner=lab", "zone=a"]
    selectors, unmatched = match_selectors(texts, LABELS)
    assert selectors.text == tuple(sorted(set(texts) - {""}))
    matches = unmatched.matches(len(selectors), len(LABELS))
    for row, text in zip(matches.tolist(), selectors.text, strict=True):
        assert row == [Selector.read("f", text).matches(labels) for labels in LABELS]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("zone", "cannot be read from 'zone'"),
        ("zone=a disk=b", "cannot be read"),
        ("zone=a,", "ends with a comma"),
        ("zone==a", "cannot be read"),
        ("zone in a", "cannot be read"),
        ("zone in (a, )", "has '', but a key or value"),
        ("zone=a\x1b[0m", "has 'a\\x1b[0m'"),
        ("zo\u00f6ne=a", "has 'zo\u00f6ne'"),
        ("-zone=a", "has '-zone'"),
        ("a" * 64 + "=b", "must be 1 to 63 letters"),
        (", ".join(f"k{i}=v" for i in range(17)), "at most 16 requirements; it has 17"),
        (f"k in ({', '.join(f'v{i}' for i in range(65))})", "at most 64 values of 'k'; it has 65"),
        ("k=" + "v" * 2000, "at most 2,000 characters; it has 2,002"),
    ],
)
def test_a_text_that_is_no_selector_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Selector.read("job.node_selector", text)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ({f"k{i}": "v" for i in range(65)}, "at most 64 labels; it has 65"),
        ({"zone": ""}, "has ''"),
        ({"zone": "a b"}, "has 'a b'"),
        ({"zone": "a\n"}, "has 'a\\n'"),
        ({"": "a"}, "has ''"),
    ],
)
def test_labels_of_nodes_are_words_and_few(labels: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        require_node_labels("nodes[0].labels", labels)
    assert problem in str(refused.value)
