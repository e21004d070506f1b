"""The way in which a job's program is started on its nodes, as users state it.

Agents import this module, so it needs only the standard library and light modules of this room.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput

MAX_VARIABLES: Final = 256
MAX_SECRETS: Final = 64
MAX_TEXT: Final = 4096
"""The largest number of characters of a variable's value, a path, an image or a word."""
MAX_PATTERN: Final = 500
"""The largest number of characters of a pattern. Each may take 20 microseconds to compile."""
MAX_WORDS: Final = 256
MAX_STALL_S: Final = 7 * 86_400.0
MAX_GRACE_S: Final = 3600.0

DEFAULT_TUNING_BUDGET_S: Final = 600.0
"""Seconds for which a job that states no budget tunes."""
MAX_TUNING_BUDGET_S: Final = 86_400.0

VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
SECRET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
USER_NAME: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_WIDE_ESCAPE: Final = re.compile(r"\\[uUN]")
OWN_PREFIX: Final = "TESSERA_"
"""The beginning of the names of variables that agents set themselves."""


class TuningSpace(StrEnum):
    """The execution plans that a job's program may try at launch, around the plan of its Cell."""

    HALVES = (
        "halves"  # the half of data or of tensor parallelism of each stage (Crius, section 5.2)
    )
    ARENA = "arena"  # those that Arena's pruning rules leave (Arena, section 3.6)
    FULL = "full"  # all with as many stages, for comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretVariable:
    """A variable whose value an agent reads from the file ``name`` of the job's tenant."""

    variable: str
    name: str

    def __post_init__(self) -> None:
        """Check the names. Raises InvalidInput."""
        _require_variable("variable", self.variable)
        if not SECRET_NAME.fullmatch(self.name):
            raise InvalidInput(
                "name", "must be 1 to 100 letters, digits, '_', '-' or '.', and not begin with '.'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The way in which a job's program is started, and how its progress is read.

    ``runtime`` is one of ``formulation.job.runtimes.RUNTIMES``, or "" for the one that the job's command
    implies.
    """

    runtime: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""  # "" for a directory of the job that its nodes share
    image: str = ""  # for engines that run containers
    secrets: tuple[SecretVariable, ...] = ()
    staging_command: tuple[str, ...] = ()  # run on each node before the program
    user: str = ""  # of the nodes' operating system; "" for the agent's choice
    progress_pattern: str = ""  # regular expression with the group "iteration"; "" for none
    stall_limit_s: float = 0.0  # 0 for the agent's default
    stop_grace_s: float = 0.0  # 0 for the agent's default
    tuning_space: str = ""  # a TuningSpace; "" if the program does not tune
    tuning_budget_s: float = 0.0  # 0 for DEFAULT_TUNING_BUDGET_S
    until_exit: bool = False  # whether the program decides when the job is done

    def __post_init__(self) -> None:
        """Check all fields but the runtime. Raises InvalidInput.

        Only the length of the pattern is checked. Stored jobs are read often, and patterns take long
        to compile: see ``check_pattern``.
        """
        if len(self.env) > MAX_VARIABLES:
            raise InvalidInput("env", f"must have at most {MAX_VARIABLES} variables")
        for name, value in self.env.items():
            _require_variable(f"env[{name[:80]}]", name)
            _require_text(f"env[{name}]", value)
        if len(self.secrets) > MAX_SECRETS:
            raise InvalidInput("secrets", f"must be at most {MAX_SECRETS}")
        names = [secret.variable for secret in self.secrets]
        for index, name in enumerate(names):
            if name in names[:index] or name in self.env:
                raise InvalidInput(
                    f"secrets[{index}].variable", f"{name} has a value already; name it once"
                )
        for name in ("workdir", "image"):
            _require_text(name, getattr(self, name))
        _require_text("progress_pattern", self.progress_pattern, MAX_PATTERN)
        if self.workdir and not self.workdir.startswith("/"):
            raise InvalidInput("workdir", "must be an absolute path")
        if len(self.staging_command) > MAX_WORDS:
            raise InvalidInput("staging_command", f"must have at most {MAX_WORDS} words")
        for index, word in enumerate(self.staging_command):
            _require_text(f"staging_command[{index}]", word)
        if self.user and not USER_NAME.fullmatch(self.user):
            raise InvalidInput("user", "must be the name of a user, in lower case")
        _require_seconds("stall_limit", self.stall_limit_s, MAX_STALL_S)
        _require_seconds("stop_grace", self.stop_grace_s, MAX_GRACE_S)
        _require_seconds("tuning_budget", self.tuning_budget_s, MAX_TUNING_BUDGET_S)
        if self.tuning_space and self.tuning_space not in list(TuningSpace):
            raise InvalidInput("tuning_space", f"must be one of {', '.join(TuningSpace)}")
        if self.tuning_budget_s and not self.tuning_space:
            raise InvalidInput("tuning_budget", "needs a tuning_space, in which plans are tried")

    @property
    def tuning_s(self) -> float:
        """Return the seconds for which the program may tune. They are 0 if it does not tune."""
        return (self.tuning_budget_s or DEFAULT_TUNING_BUDGET_S) if self.tuning_space else 0.0

    def to_plain(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON's plain values."""
        plain = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != (f.default if f.default is not MISSING else {})
        }
        if self.env:
            plain["env"] = dict(self.env)
        if self.secrets:
            plain["secrets"] = [asdict(secret) for secret in self.secrets]
        return plain


def launch_from_plain(plain: Mapping[str, Any]) -> LaunchSpec:
    """Return the launch that ``LaunchSpec.to_plain`` wrote. Raises InvalidInput, TypeError."""
    values = dict(plain)
    values["secrets"] = tuple(SecretVariable(**secret) for secret in values.get("secrets", ()))
    values["staging_command"] = tuple(values.get("staging_command", ()))
    return LaunchSpec(**values)


def check_pattern(name: str, pattern: str) -> None:
    """Check that ``pattern`` is a regular expression that finds iterations, or "".

    It is ASCII without escapes of other characters, because a class with many of them takes
    milliseconds to compile. Users' patterns must not delay servers.

    Raises:
        InvalidInput: it is not.
    """
    if not pattern:
        return
    if not pattern.isascii() or _WIDE_ESCAPE.search(pattern):
        raise InvalidInput(name, "must be of ASCII characters; write '.' for each other one")
    try:
        groups = re.compile(pattern).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidInput(name, f"is not a regular expression of Python: {error}") from error
    if "iteration" not in groups:
        raise InvalidInput(
            name, "needs the group (?P<iteration>...), the number of iterations that are done"
        )


def _require_variable(name: str, variable: str) -> None:
    if not VARIABLE.fullmatch(variable):
        raise InvalidInput(
            name, "must be the name of a variable: letters, digits and '_', not first a digit"
        )
    if variable.startswith(OWN_PREFIX):
        raise InvalidInput(
            name, f"must not begin with {OWN_PREFIX}, because the agent sets those variables"
        )


def _require_text(name: str, text: str, most: int = MAX_TEXT) -> None:
    if len(text) > most:
        raise InvalidInput(name, f"must have at most {most} characters")
    if "\0" in text:
        raise InvalidInput(name, "must not contain a zero byte")


def _require_seconds(name: str, seconds: float, most_s: float) -> None:
    if not 0 <= seconds <= most_s:
        raise InvalidInput(name, f"must be 0 to {most_s:g} seconds, not {seconds:g}")


DEFAULT_LAUNCH: Final = LaunchSpec()
"""The launch of a job that states nothing about it."""
