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
