"""The end of work whose caller has gone."""

from __future__ import annotations

from collections.abc import Callable

from tessera.formulation.base.errors import DeadlineTooShort


def never_cancelled() -> bool:
    """Return false: the caller waits for as long as the work takes."""
    return False


def require_caller(cancelled: Callable[[], bool]) -> None:
    """Stop work whose caller no longer waits. Long loops call this in each pass.

    Raises:
        DeadlineTooShort: ``cancelled`` returns true.
    """
    if cancelled():
        raise DeadlineTooShort("the call ended before its work was done")
