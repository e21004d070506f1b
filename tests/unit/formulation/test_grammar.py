"""The syntax of objectives: how texts are parsed, their meaning, and refused texts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.grammar import (
    LEXICOGRAPHIC,
    LINEAR,
    OBJECTIVES,
    Stage,
    Term,
    parse_objective,
)
from tessera.formulation.round.policy import Policy


def a_stage(*terms: tuple[float, str], tolerance: float = 0.0) -> Stage:
    return Stage(
        terms=tuple(Term(objective=name, weight=weight) for weight, name in terms),
        tolerance=tolerance,
    )


THROUGHPUT = a_stage((1, "throughput"))


@pytest.mark.parametrize("name", LEXICOGRAPHIC)
def test_levels_are_followed_by_throughput(name: str) -> None:
    assert parse_objective(name) == (a_stage((1, name)), THROUGHPUT)
    assert [s.lexicographic for s in parse_objective(name)] == [True, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.7*throughput + 0.3*jct", [a_stage((0.7, "throughput"), (0.3, "jct"))]),
        (" 2 * jct+ cost ", [a_stage((2, "jct"), (1, "cost"))]),
        ("1e+2*jct + 1E-3*cost", [a_stage((100, "jct"), (0.001, "cost"))]),
        (
            "max-min within 5% then throughput",
            [a_stage((1, "max-min"), tolerance=0.05), THROUGHPUT],
        ),
        (
            "jct within 2.5 %\nthen cost",
            [a_stage((1, "jct"), tolerance=0.025), a_stage((1, "cost"))],
        ),
        (
            "makespan then jct + cost within 1% then throughput",
            [
                a_stage((1, "makespan")),
                a_stage((1, "jct"), (1, "cost"), tolerance=0.01),
                THROUGHPUT,
            ],
        ),
    ],
)
def test_terms_have_weights_and_stages_are_in_order(text: str, expected: list[Stage]) -> None:
    assert list(parse_objective(text)) == expected


def test_a_term_of_weight_zero_is_ignored() -> None:
    assert parse_objective("0*throughput + jct + 2*cost") == parse_objective("jct + 2*cost")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("balanced:0.250", "balanced:0.25"),
        ("2*balanced:0.5", "balanced"),
        ("balanced:.1", "balanced:0.1"),
    ],
)
def test_a_share_has_one_notation(text: str, name: str) -> None:
    (stage,) = parse_objective(text)
    assert stage.name == name
    assert parse_objective(name) == (stage,)


def test_a_stage_is_named_by_its_normal_form() -> None:
    assert parse_objective("0.70*throughput+jct within 5%")[0].name == "0.7*throughput + jct"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an objective; choose from throughput"),
        ("jct:0.25", "only balanced has a share; leave it out"),
        ("balanced:1", "the share must lie between 0 and 1"),
        ("balanced:", "is not a number"),
        ("balanced:0.1 + balanced:0.10", "names an objective twice"),
        ("-1*cost", "from 0 to 1,000,000,000"),
        ("1..2*jct", "'1..2' is not a number"),
        ("throughput within 1.2.3%", "'1.2.3' is not a number"),
        ("throughput within 100%", "must be at least 0 % and below 100 %"),
        ("0*throughput + 0*jct", "all weights are 0"),
        ("max-min + throughput", "cannot be added to another objective; put them in order"),
        ("cost then cost", "names a stage twice"),
        ("nan*throughput", "is not an objective"),
        ("throughput within 5% within 3%", "is not an objective"),
    ],
)
def test_an_invalid_objective_is_refused_with_what_to_do(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_objective(text)
    with pytest.raises(InvalidInput, match=message):
        Policy(objective=text)


def test_naming_deadline_in_an_objective_turns_look_ahead_on() -> None:
    assert Policy(objective="0.5*deadline + jct").deadline_mode == "look-ahead"
    assert Policy(objective="max-min then deadline").deadline_mode == "look-ahead"
    assert Policy(objective="0*deadline + jct").deadline_mode == "keep"
    assert Policy(objective="deadline", deadlines="myopic").deadline_mode == "myopic"


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    if draw(st.booleans()):
        terms: tuple[tuple[float, str], ...] = ((1, draw(st.sampled_from(LEXICOGRAPHIC))),)
    else:
        names = draw(st.lists(st.sampled_from(LINEAR), min_size=1, max_size=3, unique=True))
        weights = st.integers(1, 9999).map(lambda n: n / 1000) if len(names) > 1 else st.just(1.0)
        terms = tuple((draw(weights), name) for name in names)
    return a_stage(*terms, tolerance=draw(st.integers(0, 99)) / 100)


@given(
    st.lists(stages(), min_size=1, max_size=4, unique_by=lambda s: frozenset(s.terms)),
    st.sampled_from(["+", " + ", "  +"]),
)
def test_written_objectives_read_back(wanted: list[Stage], plus: str) -> None:
    text = " then ".join(
        s.name.replace(" + ", plus) + (f" within {s.tolerance * 100:g}%" if s.tolerance else "")
        for s in wanted
    )
    read = parse_objective(text)
    assert read[: len(wanted)] == tuple(wanted)
    assert not read[-1].lexicographic
    assert len(read) - len(wanted) == wanted[-1].lexicographic


@given(
    st.text(max_size=40)
    | st.lists(
        st.sampled_from([*OBJECTIVES, "then", "within", "5%", "+", "*", "0.5", " ", "1e+", "%"]),
        max_size=8,
    ).map("".join)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    read: tuple[Stage, ...] = ()
    with contextlib.suppress(InvalidInput):
        read = parse_objective(text)
    assert all(term.weight > 0 for s in read for term in s.terms)
    assert not read or not read[-1].lexicographic
