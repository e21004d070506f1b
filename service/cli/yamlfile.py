"""Readers of hand-written files, as text and as YAML documents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tessera.estimator.documents import read_yaml
from tessera.estimator.documents import text_of as text_of
from tessera.formulation.documents import CLUSTER_FILE, DocumentLimits
from tessera.formulation.errors import InvalidInput

STDIN: Final = "-"


def read_text(path: str) -> str:
    """Return the text of a file, or of stdin if the path is ``-``."""
    if path == STDIN:
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(path, f"is not UTF-8 text: {error.reason}") from error


def read_documents(text: str, source: str, limits: DocumentLimits = CLUSTER_FILE) -> list[object]:
    """Return the documents of a YAML text, without empty ones. Raises InvalidInput."""
    return read_yaml(source, text, limits)
