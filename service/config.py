"""The server's settings: defaults, then one TOML file, then the environment; unknown keys are errors."""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

from pydantic import Field

from tessera.estimator.hardware import CATALOGUE, Hardware
from tessera.estimator.hardware.files import read_hardware
from tessera.estimator.profiling.tasks import Options
from tessera.estimator.schemas import check, check_fields, entry_of, hint, number, said, whole
from tessera.estimator.workloads import catalogue_of
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.store import Limits, Retention
from tessera.service.rpc.agents import AgentTiming
from tessera.service.rpc.convert.rounds import read_options
from tessera.solvers.registry import names as solver_names
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers.registry import names as published_names

MAX_MULTIPLES: Final = 16
"""Of what a job requests, in ``estimate_counts``."""

MAX_PROFILED: Final = 4096
"""Samples, or a tensor degree, in ``profile_samples`` and ``profile_tp``."""

HEAVY_THREADS: Final = 2
"""Calls about many items or large documents that run at once: each computes for seconds. One client holds
one of them, and each more would take the interpreter from all short calls."""

ESTIMATE_THREADS: Final = 2
"""EstimateCells calls at once; all of it is arithmetic, so more would not help."""

LEASE_THREADS: Final = 1
"""Calls of the server's own tasks, which renew leases and find what is due."""

OTHER_THREADS: Final = HEAVY_THREADS + ESTIMATE_THREADS + LEASE_THREADS + 5
"""Threads of no setting; one each for health, agents' heartbeats, automatic Cells, network plans, and what
is deleted in the background."""

MAX_RETAINED_DAYS: Final = 36_500
"""A century; the database knows no times before its own calendar."""

LEAST_ROUNDS: Final = 100
"""Rounds of each cluster that retention leaves, however old they are."""

PREFIX: Final = "TESSERA_"
"""``listen`` is TESSERA_LISTEN in the environment."""

OTHERS: Final = frozenset({"TESSERA_CLUSTER", "TESSERA_DATA", "TESSERA_HOME", "TESSERA_SERVER"})
"""Variables of the command line and the benchmarks. Any other unknown TESSERA_ variable is an error: a
mistyped TESSERA_DATABASE_URL must not start an empty database."""

_Value = str | int | float | bool

_Threads = Annotated[int, whole(1, 1000)]
_Many = Annotated[int, whole(1, 10**6)]
_Count = Annotated[int, whole(0, 2**31 - 1)]
_Limit = Annotated[int, whole(1, 2**31 - 1)]
_Seconds = Annotated[float, Field(ge=0, lt=1e6)]
_Positive = Annotated[float, Field(gt=0, lt=1e6)]
_Period = Annotated[float, Field(ge=1, lt=1e6)]
_Factor = Annotated[float, Field(gt=0, le=1e6)]
_Days = Annotated[float, number(0.0, MAX_RETAINED_DAYS)]
_Instance = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9._-]{0,100}$"),
    said("must be at most 100 letters, digits, '-', '_' or '.'"),
]


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
    store_threads: _Threads = 6
    """Short calls that use the database at once. Agents, leases and heavy calls have threads of their own."""
    agent_threads: _Threads = 5
    """Calls of agents that use the database at once, at least 2: more than half of them may change what is
    stored, one of each cluster at most. Heartbeats have a thread of their own."""
    round_threads: _Threads = 2
    """Rounds that callers commit and that are decided at once, one for each cluster at most. As many periodic
    rounds are decided at once, in threads that nobody else has."""
    trial_threads: _Threads = 3
    """Dry runs, replays and previews that are decided at once. Of three or more threads one client or
    cluster holds all but one at most."""
    round_queue: _Many = 64
    """Calls that wait for one of these threads, at most: half of them of one client."""
    solve_process_from_jobs: _Count = 0
    """Rounds of at least so many jobs are decided in a process of their own, so that other calls stay
    quick beside a long solve; 0: none are. Up to ``round_threads`` processes, each with its own memory."""
    period_s: _Seconds = 300.0
    """A round for each cluster so often; 0: only when asked."""
    policy: str = ""
    """The standing policy of rounds: YAML or JSON with RoundOptions' names of the API, for example
    ``{objective: deadline then jct, queue_order: true, promote_after: 2h}``. Periodic rounds follow it,
    and so does whatever a Schedule call does not say; empty: RoundOptions' defaults."""
    default_deadline_s: _Positive = 60.0
    """Deadline of a round for a call that brings none."""
    max_deadline_s: _Positive = 600.0
    """Longest deadline of a round. A call that brings a longer one gets the best answer by then."""
    grace_s: _Seconds = 10.0
    """How long a stopping server lets calls finish."""
    estimate_cells: bool = True
    """Jobs whose workload has no estimates get analytic Cells, on all GPU types of their cluster."""
    estimate_counts: str = "0.5, 1, 2"
    """At how many GPUs, times what the job requests; those that are whole numbers count."""
    estimate_period_s: _Period = 60.0
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
    retain_requests_days: _Days = 1.0
    """Days for which a repeated request is answered as before. These five: 0 keeps everything for ever."""
    retain_rounds_days: _Days = 30.0
    """Days for which rounds with their decisions, and network plans, are kept. The last 100 always are."""
    retain_rounds: _Count = 10_000
    """Latest rounds of each cluster that are kept, however young the others are."""
    retain_snapshots: _Count = 2_000
    """Latest rounds of each cluster that can be replayed: only they keep their snapshots."""
    retain_jobs_days: _Days = 30.0
    """Days for which a job is kept after its end, and old entries of a live job's history."""
    max_clusters: _Limit = 1000
    """Clusters that can be created."""
    max_nodes: _Limit = 20_000
    """Nodes that a cluster can have, and agents."""
    max_models: _Limit = 1000
    """Models that users can describe in a cluster."""
    max_tenants: _Limit = 10_000
    """Tenants that can have settings in a cluster."""
    health_period_s: _Positive = 5.0
    """How often the database is asked whether it is ready."""
    agent_streams: _Many = 10_000
    """Streams of agents at once, at most."""
    agent_streams_per_client: _Many = 5_000
    """Of these, those from one host."""
    watches: _Many = 2_000
    """Streams that watch jobs at once, at most."""
    watches_per_client: _Many = 200
    """Of these, those from one host."""
    unread_s: _Positive = 60.0
    """A stream ends when its client has not taken a message for this long."""
    poll_s: _Positive = 1.0
    """How often a watched job is read again: only changes of what should run are notified."""
    clock_factor: _Factor = 1.0
    """Seconds of training that agents replay in a second (their ``--clock-factor``): rounds take jobs to be
    this many times faster than their estimates. Periods, deadlines and waiting times are real time."""
    instance: _Instance = ""
    """A name of this one server, which health checks report as ``tessera-instance`` in their initial
    metadata. Whoever starts a server recognises it by this. Empty: none is reported."""
    lease_s: float = 30.0
    margin_s: float = 15.0
    heartbeat_s: float = 5.0
    inspect_s: float = 20.0
    """These four: see AgentTiming."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning or would open the server by accident."""
        check(entry_of(Config), "", {f.name: getattr(self, f.name) for f in fields(self)})
        self.agent_timing()
        self.round_options()
        self.estimate_multiples()
        self.profiling()
        if not (self.insecure_any_interface or _is_local(self.listen)):
            raise InvalidInput(
                "listen",
                f"{self.listen} can be reached from other machines, and callers are not authenticated;"
                " listen on 127.0.0.1, or set insecure_any_interface (--insecure-any-interface) if the"
                " network is trusted",
            )

    def __str__(self) -> str:
        """Return the settings as TOML, without secrets."""
        return "".join(f"{f.name} = {_toml(self._shown(f.name))}\n" for f in fields(self))

    def connections(self) -> int:
        """Return how many connections to the database are used at once: one for each thread."""
        rounds = 2 * self.round_threads + self.trial_threads
        return self.store_threads + max(2, self.agent_threads) + rounds + OTHER_THREADS

    def agent_timing(self) -> AgentTiming:
        """Return the rhythm of agents' streams."""
        return AgentTiming(
            lease_s=self.lease_s,
            margin_s=self.margin_s,
            heartbeat_s=self.heartbeat_s,
            inspect_s=self.inspect_s,
        )

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

    def retention(self) -> Retention:
        """Return what the database keeps of what is over."""
        return Retention(
            requests_s=_days_s(self.retain_requests_days),
            rounds_s=_days_s(self.retain_rounds_days),
            least_rounds=LEAST_ROUNDS,
            most_rounds=self.retain_rounds or math.inf,
            most_snapshots=self.retain_snapshots or math.inf,
            jobs_s=_days_s(self.retain_jobs_days),
        )

    def limits(self) -> Limits:
        """Return what users can create at most."""
        return Limits(
            clusters=self.max_clusters,
            nodes=self.max_nodes,
            models=self.max_models,
            tenants=self.max_tenants,
        )

    def _shown(self, name: str) -> _Value:
        value: _Value = getattr(self, name)
        return without_password(str(value)) if name == "database_url" else value


def load_config(file: Path | None, environment: Mapping[str, str]) -> Config:
    """Return the settings from ``file`` (if any), overridden by ``environment``.

    Raises:
        InvalidInput: unreadable, an unknown key, or a value of the wrong type or range.
    """
    values = _from_file(file) if file is not None else {}
    return Config(**(values | _from_environment(environment)))


_TYPES: Final[dict[str, type[_Value]]] = get_type_hints(Config)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(file), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(str(file), f"is not TOML: {error}") from error
    return check_fields(Config, str(file), found)


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Value]:
    found: dict[str, _Value] = {}
    for variable, text in environment.items():
        if variable.startswith(PREFIX) and variable not in OTHERS:
            key = variable.removeprefix(PREFIX).lower()
            if key not in _TYPES:
                known = [*(PREFIX + setting.upper() for setting in _TYPES), *sorted(OTHERS)]
                meant = hint(variable, known) or ";"
                raise InvalidInput(variable, f"is no setting{meant} There are {', '.join(known)}")
            found[key] = _parsed(variable, text, _TYPES[key])
    return found


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


def _days_s(days: float) -> float:
    """Return days in seconds; 0 days are for ever."""
    return days * 86_400.0 if days else math.inf


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


def without_password(url: str) -> str:
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
