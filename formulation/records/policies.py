"""Standing policies of rounds as they are stored, by version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_MESSAGE = 500
"""Largest number of characters of the reason for a policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """A version of a cluster's standing policy.

    ``options`` has the options that it sets, in the JSON form of the API's RoundOptions. None stands
    for the policy of the server's settings.
    """

    version: int  # from 1
    options: Mapping[str, Any] | None
    set_by: str  # "" if the server does not ask callers who they are
    set_s: float  # seconds since 1970
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRecord:
    """The shadow of a cluster: a policy that decides on the states of rounds, without effect."""

    key: int  # another one for each shadow that is set
    options: Mapping[str, Any]  # those that it sets, as in ``PolicyRecord``
    set_by: str
    set_s: float  # seconds since 1970
    message: str
    last_round: int  # the newest round that it decided, 0 if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFigures:
    """The figures of the decisions of one round, of the policy in force or of its shadow.

    Goals are the values of the goals of an objective, in order; more is better in each.
    """

    by_policy: tuple[float, ...]  # by the goals of the policy in force
    by_shadow: tuple[float, ...]  # by the goals of the shadow
    effective_gpus: float  # throughput, normalised as in Eq. 6
    used_gpus: int
    running: int
    waiting: int
    started: int
    suspended: int
    changed: int  # moved, resized, retyped or replanned
    solve_s: float  # from the loaded state to the checked answer
    gap: float  # NaN if nothing was proven


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRound:
    """The decisions of a shadow on the state of a round, compared with the round's own.

    If the shadow failed, ``problem`` says why, and there are no figures.
    """

    number: int
    created_s: float  # of the round, seconds since 1970
    policy_goals: tuple[str, ...] = ()  # the goals of the policy in force, with units
    shadow_goals: tuple[str, ...] = ()
    policy: DecisionFigures | None = None
    shadow: DecisionFigures | None = None
    problem: str = ""
