"""The time for which tests wait. It is long enough that only a missing event fails a test."""

from typing import Final

PATIENCE_S: Final = 300.0
"""The longest wait on a busy machine. Tests do not assert how long a wait took."""
