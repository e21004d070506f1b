"""The number of examples of property tests, by the profile in HYPOTHESIS_PROFILE.

A law states how many examples are worth trying. ``fast``, the profile of ``make test``, draws a
fifth of them, and the same ones each time. ``full``, the profile of ``make test-full``, draws three
times the number. ``explore`` draws as many as ``full``, but different ones each time.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "fast")
IS_FAST: Final = PROFILE == "fast"

DEFAULT_EXAMPLES: Final = 100
"""The number of examples of a law that does not state its own."""


def scaled(count: int) -> int:
    """Return ``count`` examples, or turns of a loop, scaled by the profile."""
    return -(-count // 5) if IS_FAST else 3 * count


def examples(count: int, *unchecked: HealthCheck) -> settings:
    """Return the settings of a law for which ``count`` examples are worth trying."""
    suppressed = [HealthCheck.too_slow, *unchecked]  # these replace the profile's own
    return settings(max_examples=scaled(count), suppress_health_check=suppressed)


def load_profile() -> None:
    """Load the hypothesis profile. It has no deadlines, since the machine may be slow."""
    for name in ("fast", "full", "explore"):
        settings.register_profile(
            name,
            max_examples=scaled(DEFAULT_EXAMPLES),
            derandomize=name != "explore",
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile(PROFILE)
