"""The number of examples of property tests, by the tier of tests that runs.

A law states how many examples are worth trying. ``make test`` draws a twentieth of them,
``make test-full`` a fifth, and ``make test-night`` three times as many. The examples are the same ones
each time, except with ``TEST_TIER=explore``, which draws as many as the night.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

TIER: Final = os.environ.get("TEST_TIER", "full")
SCALES: Final = {"quick": 0.05, "full": 0.2, "night": 3.0, "explore": 3.0}
"""Examples that are drawn for each that is worth trying, by tier."""
IS_NIGHT: Final = SCALES[TIER] > 1

DEFAULT_EXAMPLES: Final = 100
"""The number of examples of a law that does not state its own."""


def scaled(count: int) -> int:
    """Return ``count`` examples, or turns of a loop, scaled by the tier; at least 1."""
    return max(1, round(count * SCALES[TIER]))


def examples(count: int, *unchecked: HealthCheck) -> settings:
    """Return the settings of a law for which ``count`` examples are worth trying."""
    suppressed = [HealthCheck.too_slow, *unchecked]  # these replace the profile's own
    return settings(max_examples=scaled(count), suppress_health_check=suppressed)


def load_profile() -> None:
    """Load the tier's hypothesis profile. It has no deadlines, since the machine may be slow."""
    settings.register_profile(
        TIER,
        max_examples=scaled(DEFAULT_EXAMPLES),
        derandomize=TIER != "explore",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(TIER)
