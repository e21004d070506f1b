"""Readers of hand-written files, as text and as YAML documents."""

from __future__ import annotations

import sys
from typing import Final

from tessera.estimator.files import userfiles
from tessera.estimator.files.documents import read_yaml
from tessera.estimator.files.documents import text_of as text_of
from tessera.formulation.base.documents import CLUSTER_FILE, DocumentLimits

STDIN: Final = "-"


def read_text(path: str) -> str:
    """Return the text of a file, or of stdin if the path is ``-``."""
    if path == STDIN:
        return userfiles.to_text("stdin", sys.stdin.buffer.read())
    return userfiles.read_text(path)


def read_documents(text: str, source: str, limits: DocumentLimits = CLUSTER_FILE) -> list[object]:
    """Return the documents of a YAML text, without empty ones. Raises InvalidInput."""
    return read_yaml(source, text, limits)
