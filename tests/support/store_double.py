"""A double of the store, whose transactions call its own methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StoreDouble:
    """A store that calls its method with the name of a function instead of the function.

    For example, ``store.read(get_job, "c", "j")`` returns ``self.get_job("c", "j")``.
    """

    lease_s = 30.0

    def read(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the answer of the method with the function's name."""
        return getattr(self, function.__name__)(*args, **kwargs)

    change = update = read
