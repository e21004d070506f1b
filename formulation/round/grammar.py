"""The grammar of objectives: terms with weights, and stages in order.

    objective = stage { "then" stage }
    stage     = term { "+" term } [ "within" percent "%" ]
    term      = [ weight "*" ] name [ ":" share ]
    percent   = a number from 0 to below 100
    share     = a number between 0 and 1

A name may also be the reference of a plug-in, e.g. ``my_lab.values:running``, which is a sum.

``finish-time-fairness then throughput`` first makes the worst-off job as well off as possible. It
then maximizes throughput among the answers that do so. ``max-min within 5% then throughput`` lets
the later stages give away 5 % of what the stage before reached. ``0.7*throughput + 0.3*jct`` adds
values. ``balanced:0.25`` is the geometric mean of throughput, to the power of 0.75, and completion
time, to the power of 0.25. ``balanced`` alone has even powers. No other objective has a share.

Fairness objectives are compared job by job and have no sum, so each is alone in its stage. Terms of
weight 0 have no effect and are dropped. A term that is alone in its stage has weight 1, whatever
weight is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.plugins import REFERENCE_PATTERN, find_plugin

LINEAR: Final = ("throughput", "deadline", "jct", "balanced", "cost")
"""Objectives that are sums over jobs."""

BALANCED: Final = "balanced"
EVEN_SHARE: Final = 0.5
"""The share of completion time in ``balanced`` if none is written."""

LEXICOGRAPHIC: Final = ("finish-time-fairness", "max-min", "makespan")
"""Objectives that compare the worst-off job first, then the next."""

OBJECTIVES: Final = (*LINEAR, *LEXICOGRAPHIC)

LARGEST_WEIGHT: Final = 1e9
"""The largest weight of a term, even in a recorded round. With more, no other term would count."""

_WITHIN = re.compile(r"^(?P<sum>.*?)(?:\s+within\s+(?P<percent>[0-9.]+)\s*%)?$", re.DOTALL)
_TERM = re.compile(r"^(?:(?P<weight>[0-9.eE+-]+)\s*\*\s*)?(?P<name>[a-z-]+)(?P<share>:[^:]*)?$")
_PLUGIN_TERM = re.compile(
    rf"^(?:(?P<weight>[0-9.eE+-]+)\s*\*\s*)?(?P<name>{REFERENCE_PATTERN})$", re.ASCII
)
_PLUS = re.compile(r"(?<![0-9.][eE])\+")  # not the plus sign of 1e+3


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One objective, with the weight of its values relative to the other terms of its stage."""

    objective: str  # with its share, if that is not the usual one
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Terms that are optimized together. Later stages may give away the share ``tolerance``."""

    terms: tuple[Term, ...]
    tolerance: float = 0.0

    @property
    def lexicographic(self) -> bool:
        """Return whether the stage compares the worst-off jobs instead of adding up values."""
        return self.terms[0].objective in LEXICOGRAPHIC

    @property
    def name(self) -> str:
        """Return the stage as it was written, without its tolerance."""
        return " + ".join(
            t.objective if t.weight == 1.0 else f"{t.weight:g}*{t.objective}" for t in self.terms
        )


MAX_STAGES: Final = 8
"""Stages that a caller may ask for, as each is solved in turn. There are eight objectives."""

MIN_WEIGHT: Final = 1e-6
MAX_WEIGHT: Final = 1e6
"""The largest weight of a term that a caller may ask for; ``MIN_WEIGHT`` is the smallest.

Beyond these, the lighter term is lost in rounding.
"""


def require_bounded(stages: tuple[Stage, ...]) -> None:
    """Refuse objectives that multiply a round's work.

    This is a check for callers. Recorded rounds may have more.

    Raises:
        InvalidInput: there are too many stages, or a weight is too small or too large.
    """
    if len(stages) > MAX_STAGES:
        raise InvalidInput(
            "objective", f"has {len(stages)} stages; name at most {MAX_STAGES}, joined by 'then'"
        )
    for term in (term for stage in stages for term in stage.terms):
        if not MIN_WEIGHT <= term.weight <= MAX_WEIGHT:
            raise InvalidInput(
                "objective",
                f"the weight {term.weight:g} of {term.objective} must lie in"
                f" [{MIN_WEIGHT:g}, {MAX_WEIGHT:,.0f}]",
            )


@lru_cache(maxsize=256)
def parse_objective(text: str) -> tuple[Stage, ...]:
    """Return the stages of ``text``. The last is a sum: the one named, or else throughput.

    Raises:
        InvalidInput: it is not an objective; the message says what is.
    """
    stages = tuple(_stage(part.strip()) for part in re.split(r"\bthen\b", text))
    if len({frozenset(s.terms) for s in stages}) != len(stages):
        raise InvalidInput("objective", f"{text!r} names a stage twice; name each stage once")
    if stages[-1].lexicographic:
        return (*stages, Stage(terms=(Term(objective="throughput"),)))
    return stages


def _stage(text: str) -> Stage:
    match = _WITHIN.match(text)
    if match is None:
        raise _wrong(text)
    terms = tuple(_term(part.strip()) for part in _PLUS.split(match["sum"]))
    if len({term.objective for term in terms}) != len(terms):
        raise InvalidInput("objective", f"{text!r} names an objective twice; add its weights up")
    if len(terms) > 1 and any(term.objective in LEXICOGRAPHIC for term in terms):
        raise InvalidInput(
            "objective",
            f"{text!r}: {', '.join(LEXICOGRAPHIC)} cannot be added to another objective;"
            " put them in order with 'then'",
        )
    tolerance = _number(match["percent"] or "0") / 100
    if not 0 <= tolerance < 1:
        raise InvalidInput(
            "objective", f"{text!r}: the tolerance must be at least 0 % and below 100 %"
        )
    terms = tuple(term for term in terms if term.weight > 0)
    if not terms:
        raise InvalidInput("objective", f"{text!r}: all weights are 0; give one a positive weight")
    if len(terms) == 1:
        terms = (Term(objective=terms[0].objective),)
    return Stage(terms=terms, tolerance=tolerance)


def _term(text: str) -> Term:
    plugin = _PLUGIN_TERM.match(text)
    if plugin is not None and find_plugin(plugin["name"]) is not None:
        return Term(objective=plugin["name"], weight=_weight(text, plugin["weight"]))
    match = _TERM.match(text)
    if match is None or match["name"] not in OBJECTIVES:
        raise _wrong(text)
    return Term(
        objective=_with_share(text, match["name"], match["share"]),
        weight=_weight(text, match["weight"]),
    )


def _weight(text: str, written: str | None) -> float:
    """Return the weight of a term, which is 1 if none is written."""
    weight = _number(written or "1")
    if not 0 <= weight <= LARGEST_WEIGHT:
        raise InvalidInput(
            "objective", f"{text!r}: a weight must be a number from 0 to {LARGEST_WEIGHT:,.0f}"
        )
    return weight


def _with_share(text: str, name: str, share: str | None) -> str:
    """Return an objective in the one notation of its share."""
    if share is None:
        return name
    if name != BALANCED:
        raise InvalidInput("objective", f"{text!r}: only {BALANCED} has a share; leave it out")
    number = _number(share[1:])
    if not 0 < number < 1:
        raise InvalidInput("objective", f"{text!r}: the share must lie between 0 and 1")
    return name if number == EVEN_SHARE else f"{name}:{number!r}"


def share_of(objective: str) -> tuple[str, float]:
    """Return the name of an objective without its share, and the share of completion time."""
    name, _, share = objective.partition(":")
    return name, float(share or EVEN_SHARE)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput("objective", f"{text!r} is not a number") from None


def _wrong(text: str) -> InvalidInput:
    return InvalidInput(
        "objective",
        f"{text!r} is not an objective; choose from {', '.join(OBJECTIVES)}, or combine them as in"
        " '0.7*throughput + 0.3*jct' or 'max-min within 5% then throughput'",
    )
