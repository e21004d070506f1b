"""The end of work that nobody waits for any more."""

from __future__ import annotations

from collections.abc import Callable

from tessera.formulation.errors import DeadlineTooShort


def never() -> bool:
    """Return false: the caller waits for as long as it takes."""
    return False


def require_caller(cancelled: Callable[[], bool]) -> None:
    """Stop work that nobody waits for; long loops ask in each pass.

    Raises:
        DeadlineTooShort: ``cancelled`` returns true.
    """
    if cancelled():
        raise DeadlineTooShort("the call ended before its work was done")
