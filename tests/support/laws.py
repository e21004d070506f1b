"""How far tests look: as far as the profile says that HYPOTHESIS_PROFILE names.

A law states how many examples are worth looking at. ``fast``, the profile of ``make test``, draws a third
of them, and the same each time. ``full``, that of ``make test-full``, draws three times as many. ``explore``
draws as many as ``full``, and others each time.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "fast")
IS_FAST: Final = PROFILE == "fast"

DEFAULT_EXAMPLES: Final = 100
"""Examples that are worth looking at for a law that does not say."""


def scaled(count: int) -> int:
    """Return how many of ``count`` examples, or turns of a loop, the profile looks at."""
    return -(-count // 3) if IS_FAST else 3 * count


def examples(count: int, *unchecked: HealthCheck) -> settings:
    """Return the settings of a law for which ``count`` examples are worth looking at."""
    suppressed = [HealthCheck.too_slow, *unchecked]  # as the profile says
    return settings(max_examples=scaled(count), suppress_health_check=suppressed)


def load_profile() -> None:
    """Let hypothesis look as far as the profile says, however slow the machine is."""
    for name in ("fast", "full", "explore"):
        settings.register_profile(
            name,
            max_examples=scaled(DEFAULT_EXAMPLES),
            derandomize=name != "explore",
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile(PROFILE)
