"""The tasks of a sweep: named calls of importable functions, with options as JSON."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput, TesseraError
from tessera.simulator.provenance import ROOT

PACKAGES: Final = (
    "benchmarks",
    "db",
    "estimator",
    "formulation",
    "modelling",
    "service",
    "simulator",
    "solvers",
)
GENERATED: Final = ("v1", "proto/gen/tessera")
"""The location of the generated package when installed, and in a checkout."""
_DRAWING: Final = ROOT / "simulator" / "report"
ONE_THREAD: Final = {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMBA")
}
"""The environment of every task. Sums must not depend on the number of threads of a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A call of ``function``, as "module:function", with ``options`` by name.

    The function returns a dictionary. It may depend only on the options, the code and the contents
    of ``files``, so that it can be kept and read again. A seed is an option.
    """

    name: str
    function: str
    options: Mapping[str, Any]
    files: tuple[Path, ...] = ()

    @property
    def call(self) -> str:
        """Return the call as one line of JSON."""
        try:
            return json.dumps([self.function, dict(self.options)], sort_keys=True)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"options of {self.name}", f"must be JSON: {error}") from error

    def key(self, code: str) -> str:
        """Return the digest of everything that the result depends on.

        ``code`` is the digest of the code.
        """
        contents = [_sha256(file.read_bytes()) for file in self.files]
        return _sha256(json.dumps([self.call, contents, code]).encode())[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """The outcome of a task: a ``result`` as JSON, or the error output of a failed task."""

    task: Task
    result: str = ""
    failure: str = ""


class TasksFailed(TesseraError):
    """An error for a sweep in which some tasks failed.

    ``failures`` has the output of each. The results of the other tasks are kept.
    """

    reason = "TASKS_FAILED"

    def __init__(self, failures: Mapping[str, str], count: int) -> None:
        shown = "\n\n".join(f"{name}:\n{output.strip()}" for name, output in failures.items())
        super().__init__(f"{len(failures)} of {count} tasks failed\n\n{shown}")
        self.failures = dict(failures)


def answer_call(call: str) -> str:
    """Carry out a task's ``call`` in this process, and return its result as JSON."""
    function, options = json.loads(call)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(**options)
    if not isinstance(result, dict):
        raise TypeError(f"{function} must return a dictionary, not {type(result).__name__}")
    return json.dumps(result)


def code_digest() -> str:
    """Return the digest of our code, without the parts that only draw.

    Commits that change no code keep the digest.
    """
    generated = next(folder for place in GENERATED if (folder := ROOT / place).is_dir())
    digest = hashlib.sha256()
    for package in [*(ROOT / name for name in PACKAGES), generated]:
        for file in sorted(package.rglob("*.py")):
            if not file.is_relative_to(_DRAWING):
                digest.update(f"{file.relative_to(package.parent)}\0".encode())
                digest.update(_sha256(file.read_bytes()).encode())
    return digest.hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
