"""The server's settings: defaults, then one TOML file, then the environment; unknown keys are errors."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Final, get_type_hints

from estimator.hardware import CATALOGUE, Hardware
from estimator.hardware.files import read_hardware
from formulation.errors import InvalidInput
from service.estimating import catalogue_of
from service.profiling import Options
from service.roundoptions import RoundOptions
from service.rpc.agents import AgentTiming
from service.rpc.convert.rounds import read_options
from solvers.policies.registry import names as published_names
from solvers.registry import names as solver_names

MAX_MULTIPLES: Final = 16
"""Of what a job requests, in ``estimate_counts``."""

MAX_PROFILED: Final = 4096
"""Samples, or a tensor degree, in ``profile_samples`` and ``profile_tp``."""

PREFIX: Final = "TESSERA_"
"""``listen`` is TESSERA_LISTEN in the environment."""

OTHERS: Final = frozenset({"TESSERA_CLUSTER", "TESSERA_DATA", "TESSERA_SERVER"})
"""Variables of the command line and the benchmarks. Any other unknown TESSERA_ variable is an error: a
mistyped TESSERA_DATABASE_URL must not start an empty database."""

NEAR: Final = 0.75
"""How like a setting a mistyped one must be for the setting to be suggested; 1: the same."""

_Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The server's settings. Printable: no secret appears in ``str`` or ``repr``."""

    listen: str = "127.0.0.1:7070"
    """Host and port, or unix:/path. Port 0: any free one."""
    insecure_any_interface: bool = False
    """Callers are not authenticated, so other machines are let in only where this says so."""
    database_url: str = field(default="", repr=False)
    """postgresql://...; empty: the embedded database."""
    database_directory: str = ""
    """Where the embedded database lives; empty: where it likes to."""
    store_threads: int = 16
    """Calls that wait for the database at once."""
    round_threads: int = 2
    """Rounds that are decided at once."""
    solve_process_from_jobs: int = 0
    """Rounds of at least so many jobs are decided in a process of their own, so that other calls stay
    quick beside a long solve; 0: none are. Up to ``round_threads`` processes, each with its own memory."""
    period_s: float = 300.0
    """A round for each cluster so often; 0: only when asked."""
    policy: str = ""
    """The standing policy of rounds: YAML or JSON with RoundOptions' names of the API, for example
    ``{objective: deadline then jct, queue_order: true, promote_after: 7200s}``. Periodic rounds follow it,
    and so does whatever a Schedule call does not say; empty: RoundOptions' defaults."""
    default_deadline_s: float = 60.0
    """What a Schedule call gets that brings no deadline."""
    grace_s: float = 10.0
    """How long a stopping server lets calls finish."""
    estimate_cells: bool = True
    """Jobs whose workload has no estimates get analytic Cells, on all GPU types of their cluster."""
    estimate_counts: str = "0.5, 1, 2"
    """At how many GPUs, times what the job requests; those that are whole numbers count."""
    estimate_period_s: float = 60.0
    """How often what is estimated is looked at again, beside whenever a job without estimates comes."""
    learn: bool = True
    """What jobs report of their iteration times corrects the estimates of like Cells."""
    profile: bool = False
    """Layers of every workload are measured, not only of those whose jobs ask for it: by tasks on one GPU of
    each type, where nobody else wants it."""
    profile_samples: str = "1, 2, 4, 8"
    """At how many samples on the one GPU."""
    profile_tp: str = "1"
    """At which tensor degrees; beyond 1 only steps that take ``tp`` can be measured."""
    hardware: str = ""
    """A YAML file with GPU types beside the catalogue's (``estimator.hardware.files``); empty: none."""
    health_period_s: float = 5.0
    """How often the database is asked whether it is ready."""
    poll_s: float = 1.0
    """How often a watched job is read again: only changes of what should run are notified."""
    lease_s: float = 30.0
    margin_s: float = 15.0
    heartbeat_s: float = 5.0
    inspect_s: float = 20.0
    """These four: see AgentTiming."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning or would open the server by accident."""
        for name in ("store_threads", "round_threads"):
            if not 1 <= getattr(self, name) <= 1000:
                raise InvalidInput(name, "must lie in 1 to 1,000")
        if not 0 <= self.solve_process_from_jobs < 2**31:
            raise InvalidInput("solve_process_from_jobs", "must be 0 or a number of jobs")
        for name in ("default_deadline_s", "health_period_s", "poll_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise InvalidInput(name, "must be a positive number of seconds")
        for name in ("grace_s", "period_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise InvalidInput(name, "must be 0 s or more")
        if not 1 <= self.estimate_period_s < 1e6:
            raise InvalidInput("estimate_period_s", "must be 1 s or more")
        self.agent_timing()
        self.round_options()
        self.estimate_multiples()
        self.profiling()
        if not (self.insecure_any_interface or _is_local(self.listen)):
            raise InvalidInput(
                "listen",
                f"{self.listen} can be reached from other machines, and callers are not authenticated;"
                " listen on 127.0.0.1, or set insecure_any_interface if the network is trusted",
            )

    def __str__(self) -> str:
        """Return the settings as TOML, without secrets."""
        return "".join(f"{f.name} = {_toml(self._shown(f.name))}\n" for f in fields(self))

    def agent_timing(self) -> AgentTiming:
        """Return the rhythm of agents' streams."""
        return AgentTiming(
            lease_s=self.lease_s, margin_s=self.margin_s, heartbeat_s=self.heartbeat_s,
            inspect_s=self.inspect_s,
        )  # fmt: skip

    def round_options(self) -> RoundOptions:
        """Return the standing policy. Its rounds last for the period unless it says otherwise.

        Raises:
            InvalidInput: it is no policy, or names a solver or published policy that there is not.
        """
        usual = RoundOptions(round_s=self.period_s) if self.period_s else RoundOptions()
        found = read_options("policy", self.policy, usual)
        for place, name, known in (
            ("policy.solver", found.solver, solver_names()),
            ("policy.scheduler", found.scheduler, ("", *published_names())),
        ):
            if name not in known:
                choices = ", ".join(filter(None, known))
                raise InvalidInput(place, f"unknown {name!r}; choose one of {choices}")
        return found

    def estimate_multiples(self) -> tuple[float, ...]:
        """Return what GPU counts are multiplied by. Raises InvalidInput."""
        try:
            found = tuple(float(part) for part in self.estimate_counts.split(","))
        except ValueError:
            found = ()
        if not 1 <= len(found) <= MAX_MULTIPLES or not all(0 < x <= 1024 for x in found):
            raise InvalidInput(
                "estimate_counts",
                f"must be 1 to {MAX_MULTIPLES} numbers above 0 and up to 1,024, such as 0.5, 1, 2, 4",
            )
        return found

    def profiling(self) -> Options:
        """Return what is profiled, and when. Raises InvalidInput."""
        found = {}
        for name in ("profile_samples", "profile_tp"):
            texts = [text.strip() for text in getattr(self, name).split(",")]
            if not all(t.isdecimal() and 1 <= int(t) <= MAX_PROFILED for t in texts):
                raise InvalidInput(
                    name, f"must be numbers from 1 to {MAX_PROFILED:,}, such as 1, 2"
                )
            found[name] = tuple(sorted({int(t) for t in texts}))
        return Options(
            always=self.profile, samples=found["profile_samples"], tp=found["profile_tp"]
        )

    def catalogue(self) -> dict[str, Hardware]:
        """Return the GPU types that Cells can be estimated for. Raises InvalidInput: the file is wrong."""
        return catalogue_of(read_hardware(Path(self.hardware)) if self.hardware else CATALOGUE)

    def _shown(self, name: str) -> _Value:
        value: _Value = getattr(self, name)
        return _without_password(str(value)) if name == "database_url" else value


def load_config(file: Path | None, environment: Mapping[str, str]) -> Config:
    """Return the settings from ``file`` (if any), overridden by ``environment``.

    Raises:
        InvalidInput: unreadable, an unknown key, or a value of the wrong type or range.
    """
    values = _from_file(file) if file is not None else {}
    return Config(**(values | _from_environment(environment)))  # type: ignore[arg-type] # checked


_TYPES: Final[dict[str, type[_Value]]] = get_type_hints(Config)


def _from_file(file: Path) -> dict[str, _Value]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(file), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(str(file), f"is not TOML: {error}") from error
    for key, value in found.items():
        kind = _type_of(f"{file}: {key}", key)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise InvalidInput(f"{file}: {key}", f"must be {_said(kind)}")
    return {key: float(value) if _TYPES[key] is float else value for key, value in found.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Value]:
    found: dict[str, _Value] = {}
    for variable, text in environment.items():
        if variable.startswith(PREFIX) and variable not in OTHERS:
            key = variable.removeprefix(PREFIX).lower()
            if key not in _TYPES:
                raise InvalidInput(
                    variable, _unknown(variable, [*map(_variable, _TYPES), *sorted(OTHERS)])
                )
            found[key] = _parsed(variable, text, _TYPES[key])
    return found


def _type_of(place: str, key: str) -> type[_Value]:
    if key not in _TYPES:
        raise InvalidInput(place, _unknown(key, list(_TYPES)))
    return _TYPES[key]


def _variable(key: str) -> str:
    return PREFIX + key.upper()


def _unknown(name: str, known: Sequence[str]) -> str:
    """Return what is wrong with an unknown name, with the one that was probably meant."""
    near = get_close_matches(name, known, n=1, cutoff=NEAR)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"is no setting; {hint}There are {', '.join(known)}"


def _parsed(place: str, text: str, kind: type[_Value]) -> _Value:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InvalidInput(place, "must be true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise InvalidInput(place, f"must be {_said(kind)}") from None


def _said(kind: type[_Value]) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def _is_local(listen: str) -> bool:
    """Return whether only this machine can reach the address."""
    if listen.startswith("unix:"):
        return True
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_password(url: str) -> str:
    """Return ``url`` with every password in it masked."""
    masked = re.sub(r"(//[^/:@]*):.*@", r"\1:***@", url)
    return re.sub(r"(password=)[^&\s]*", r"\1***", masked)


def _toml(value: _Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return repr(value)
