"""Each rule of the style check can fail, and good names and phrases pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import load_script

MODULE = "formulation/m.py"

BAD = [
    ("def _solved(): pass", "participle"),
    ("class Draft:\n    def kept(self): pass", "participle"),
    ("class _Given: pass", "participle"),
    ("def run_case(found): pass", "participle"),
    ("def run_case(*, chosen=None): pass", "participle"),
    ("solve = lambda wanted: 1", "participle"),
    ("class Round:\n    known: int = 0", "participle"),
    ("class Round:\n    def __init__(self): self._held = 0", "participle"),
    ("left = 3", "participle"),
    ("KNOWN = 3", "participle"),
    ("total, placed_ = 1, 2", "participle"),
    ("read = 3", "participle"),
    ("for at in range(3): pass", "preposition"),
    ("class Demand:\n    def of(self): pass", "preposition"),
    ("def list_rows(after_2): pass", "preposition"),
    ("rows = [one for one in jobs]", "pronoun"),
    ("def start(*others): pass", "pronoun"),
    ("if (own := load()): pass", "pronoun"),
    ("with open(path) as ours: pass", "pronoun"),
    ("try: pass\nexcept ValueError as what: pass", "pronoun"),
    ("now = current_gangs()", "adverb"),
    ("first, *columns = rows", "adverb"),
    ("match row:\n    case [*last]: pass", "adverb"),
    ("match row:\n    case {'a': 1, **then}: pass", "adverb"),
    ("match row:\n    case int() as later: pass", "adverb"),
    ("whole = 1", "quantifier"),
    ("*rest, column = rows", "quantifier"),
    ("from formulation import patterns as most", "quantifier"),
    ("most_waiting = 4", "quantifier"),
    ("MOST_NODES = 4", "quantifier"),
    ("def that_fit(): pass", "fragment"),
    ("def place_so_that_counts_fit(): pass", "fragment"),
    ("def require_few_clusters(): pass", "fragment"),
    ("left_s = 3.0", "fragment"),
    ("for kind, gpu_type in enumerate(gpu_types): pass", "glossary"),
    ("names = [kind for kind in snapshot.gpu_types]", "glossary"),
    ("def price(kind: int, gpu_types: list): pass", "glossary"),
    ("policy = GavelScheduler()", "glossary"),
    ("def run(policy: Scheduler): pass", "glossary"),
    ("level = goals[0]", "glossary"),
    ('"""Return the rows and those of others."""', "those_of"),
    ('raise ValueError("not that\\nof the job")', "that_of"),
    ("x = 1  # those\n# of the job", "those_of"),
    ("x = 1  # gives what is left", "what_is"),
    ('"""Return the bound, too."""', "final_too"),
]
"""Texts of modules, each with the rule that it breaks."""


@pytest.fixture(scope="module")
def style() -> Any:
    return load_script("style")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of limits."""
    path = tmp_path / "style_limits.toml"
    path.write_text('"a.py" = { adverb = 2, participle = 1 }\n"b.py" = { that_of = 3 }\n')
    return path


def rules_broken(style: Any, root: Path, text: str, path: str = MODULE) -> list[str]:
    """Return the rules that a file with a text breaks."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    findings = style.find_all(style.load_tree(root, [path]))
    assert all(finding.path == path and finding.advice for finding in findings)
    return [finding.rule for finding in findings]


def finding(style: Any, path: str, rule: str) -> Any:
    return style.StyleFinding(path, 7, rule, "local 'x'", "a better name")


@pytest.mark.parametrize(("text", "rule"), BAD)
def test_each_rule_fails_for_a_bad_name_or_phrase(
    style: Any, tmp_path: Path, text: str, rule: str
) -> None:
    assert rules_broken(style, tmp_path, text) == [rule]


def test_no_rule_is_without_an_example_that_fails(style: Any) -> None:
    assert {rule for _, rule in BAD} | {"class_home"} == style.ADVICE.keys()


def test_a_class_that_another_file_has_fails_in_both(style: Any, tmp_path: Path) -> None:
    paths = ["db/turns.py", "docs/turns.py", "service/turns.py", "tests/turns.py"]
    for path, text in zip(paths, [*3 * ["class Turn: pass"], "class Lane: pass"], strict=True):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    findings = style.find_all(style.load_tree(tmp_path, paths))
    assert [(f.path, f.rule) for f in findings] == [
        ("db/turns.py", "class_home"),
        ("service/turns.py", "class_home"),
    ]
    assert "service/turns.py" in findings[0].advice


@pytest.mark.parametrize(
    "text",
    [
        "def solve_rows(case, columns): pass",
        "class Draft:\n    kept_rows: int\n    def filter_rows(self): self._node = 1",
        "MAX_NODES, speed, need, bound, deepspeed = rows",
        "from formulation import patterns, known",
        "job.left = 1",
        "left += 1",
        "left, right = 1, 2",
        "first, second = jobs",
        "class File:\n    def read(self): pass\n    def closed(self): pass",
        "class Clock:\n    def now(self): pass",
        "now = clock.now()",
        "def wait(now: datetime): pass",
        "def add(self, other): pass",
        "def total(rows, out=None, where=True): pass",
        "class Mode(StrEnum):\n    KEPT = 'k'",
        "STOPPED = 'stopped'",
        "for type_index, gpu_type in enumerate(gpu_types): pass",
        "kind = reasons[0]",
        "def run(policy: Policy, scheduler: Scheduler): pass",
        "class HeldGpus: pass",
        "def least_squares(rows): pass",
        '"""Return the rows of others. What is it? Too many."""',
        "text = 'a # those'  # of the job",
    ],
)
def test_good_names_and_phrases_pass(style: Any, tmp_path: Path, text: str) -> None:
    assert rules_broken(style, tmp_path, text) == []


def test_tests_are_sentences_and_share_two_words(style: Any, tmp_path: Path) -> None:
    text = "def test_rows_that_fit(): expected, captured = 1, 2"
    assert rules_broken(style, tmp_path, text, "tests/unit/test_m.py") == []
    text = "def decide(found): wanted = found"
    assert rules_broken(style, tmp_path, text, "tests/unit/test_m.py") == ["participle"] * 2


def test_phrases_of_documents_count_outside_of_code(style: Any, tmp_path: Path) -> None:
    text = "# Page\n\nThe rows and those\nof the job.\n\n    that of\n"
    assert rules_broken(style, tmp_path, text, "docs/page.md") == ["those_of"]
    text = "// Gives what is left, too.\n"
    assert rules_broken(style, tmp_path, text, "proto/a.proto") == ["final_too", "what_is"]


def test_an_error_names_the_place_the_rule_and_a_better_name(style: Any, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("\nfound = 1\n")
    (found_name,) = style.find_all(style.load_tree(tmp_path, ["m.py"]))
    assert str(found_name).startswith("m.py:2: local 'found' (participle): add the noun")
    assert "match" in str(found_name)


def test_a_folder_with_too_many_modules_fails_unless_it_is_of_tests(style: Any) -> None:
    modules = [f"{room}/part/{name}.py" for room in ("db", "tests") for name in range(25)]
    modules += ["db/part/__init__.py", "tests/part/more.py"]
    assert style.crowded_folders(modules) == []
    assert style.crowded_folders([*modules, "db/part/more.py"]) == ["db/part/ has 26"]


def test_a_word_that_the_glossary_refuses_needs_a_rule(style: Any) -> None:
    assert style.unknown_glossary_words('| lane | A stage. Not "kind" and not "road". |') == [
        "road"
    ]


@pytest.mark.parametrize(
    ("paths", "error"),
    [
        (["a.py"] * 3, r"a\.py: the count of 'adverb' is 3, its limit 2:"),
        (["a.py"] * 2 + ["new.py"], r"new\.py: the count of 'adverb' is 1, its limit 0:"),
        (["a.py"] * 2 + ["new.py"], r"If new\.py was moved or split, move its limits .* by hand"),
        (["a.py"], r"a\.py: the limit of 'adverb' is 2, its count 1. Run .* --lower"),
        ([], r"a\.py: the limit of 'adverb' is 2, its count 0. Run .* --lower"),
    ],
)
def test_a_count_other_than_its_limit_fails(
    style: Any, file: Path, paths: list[str], error: str
) -> None:
    findings = [
        finding(style, "a.py", "participle"),
        *3 * [finding(style, "b.py", "that_of")],
        *(finding(style, path, "adverb") for path in paths),
    ]
    errors = style.limits.check_limits(file, findings)
    assert re.search(error, "\n".join(errors))
    assert (
        style.limits.check_limits(file, [*findings[:4], *2 * [finding(style, "a.py", "adverb")]])
        == []
    )


def test_limits_are_only_lowered_and_removed(style: Any, file: Path) -> None:
    findings = [finding(style, "a.py", rule) for rule in ("adverb", "participle")]
    assert style.limits.check_limits(file, findings, is_to_lower=True) == []
    assert style.limits.load_limits(file) == {"a.py": {"adverb": 1, "participle": 1}}


@pytest.mark.parametrize("path", ["a.py", "moved.py"])
def test_no_limit_is_lowered_while_another_is_passed(style: Any, file: Path, path: str) -> None:
    limits = style.limits.load_limits(file)
    findings = 2 * [finding(style, path, "participle")]
    errors = style.limits.check_limits(file, findings, is_to_lower=True)
    assert f"{path}: the count of 'participle' is 2, its limit {int(path == 'a.py')}:" in errors
    assert any(error.startswith("Nothing was lowered") for error in errors)
    assert style.limits.load_limits(file) == limits


def test_limits_have_one_line_for_each_file_in_order(style: Any, file: Path) -> None:
    style.limits.store_limits(file, {"b.py": {"that_of": 1}, "a.py": {"pronoun": 2, "adverb": 1}})
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert lines == ['"a.py" = { adverb = 1, pronoun = 2 }', '"b.py" = { that_of = 1 }']
