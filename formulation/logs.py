"""The form of log messages: their time, level, action and text, without secrets."""

from __future__ import annotations

import logging
from typing import Final

from tessera.formulation.secrets import hide_secrets

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(action)s: %(message)s"


class DiscreetFormatter(logging.Formatter):
    """A formatter that hides secrets in messages, their arguments and tracebacks."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT, defaults={"action": "-"})

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record with every secret in it hidden."""
        return hide_secrets(super().format(record))
