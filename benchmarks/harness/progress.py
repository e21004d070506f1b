"""The progress of long work, on standard error."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.progress import track


def track_steps(count: int, what: str) -> Iterator[int]:
    """Yield 0 to count - 1 with a progress bar on standard error."""
    console = Console(stderr=True)
    yield from track(range(count), description=what, console=console, transient=True)
