"""The server's settings: defaults, overridden by one TOML file and then by the environment.

Unknown keys are errors.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

from pydantic import Field

from tessera.client import is_on_this_machine
from tessera.client.settings import VARIABLES as CLIENT_VARIABLES
from tessera.estimator.hardware import CATALOGUE, Hardware
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.hardware.files import read_hardware
from tessera.estimator.profiling.limits import ProfilingLimits
from tessera.estimator.profiling.tasks import ProfilingOptions
from tessera.estimator.reconfiguration.fitting import FITTED_RUNS
from tessera.estimator.reconfiguration.judging import MAX_RUNS
from tessera.estimator.schemas import (
    check_fields,
    check_value,
    described_as,
    entry_of,
    number_between,
    suggest_name,
    whole_between,
)
from tessera.formulation.access import PEOPLE
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.store import Retention, StoreLimits
from tessera.formulation.release import install_hint
from tessera.service.rpc.agents import AgentTiming
from tessera.service.rpc.convert.rounds import read_options
from tessera.service.security.oidc import OidcSettings
from tessera.service.webhooks.addresses import read_networks
from tessera.service.webhooks.sending import SendingOptions
from tessera.solvers.plugins import load_plugins
from tessera.solvers.registry import solver_names as solver_names
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers.registry import scheduler_of

MAX_MULTIPLES: Final = 16
"""Largest number of entries in ``estimate_counts``, which are multiples of a job's request."""

MAX_PROFILED: Final = 4096
"""Largest number of samples in ``profile_samples``, and largest tensor degree in ``profile_tp``."""

HEAVY_THREADS: Final = 2
"""Number of calls about many items or large documents that run at the same time.

Each computes for seconds. One client can hold one of these threads. With more threads, short calls
would not get the interpreter.
"""

ESTIMATE_THREADS: Final = 2
"""Number of EstimateCells calls that run at the same time. They only compute: more do not help."""

LEASE_THREADS: Final = 1
"""Number of calls of the server's own tasks that run at the same time. They renew leases and look
for rounds that are due.
"""

IDENTITY_THREADS: Final = 2
"""Number of threads that look up tokens and certificates, check tokens of an identity provider, and
enrol agents.
"""

LOG_THREADS: Final = 1
"""Number of threads that pass on requests for the output of jobs, and the answers. Each use is
short.
"""

OTHER_THREADS: Final = (
    HEAVY_THREADS + ESTIMATE_THREADS + LEASE_THREADS + IDENTITY_THREADS + LOG_THREADS + 6
)
"""Number of threads that no setting controls and that use the database at the same time.

The 6 are one each for health and heartbeats of agents, and four for what runs in the background:
automatic estimates, network plans, deletion, checks of collectives, forecasts, shadows and webhooks.
These seldom use the database at the same time. If they do, some wait for a connection.
"""

MAX_RETAINED_DAYS: Final = 36_500
"""Longest retention in days, a century: the database cannot represent times before its calendar."""

MIN_KEPT_ROUNDS: Final = 100
"""Number of latest rounds of each cluster that retention never deletes, however old they are."""

VARIABLE_PREFIX: Final = "TESSERA_"
"""Prefix of the environment variables: ``listen`` is TESSERA_LISTEN."""

OTHER_VARIABLES: Final = frozenset(
    {
        "TESSERA_CLUSTER",
        "TESSERA_DATA",
        "TESSERA_HOME",
        "TESSERA_SERVER",
        "TESSERA_TORCH_PYTHON",
        *CLIENT_VARIABLES,
    }
)
"""Variables that the command line, agents, the benchmarks and the demonstrations read.

Any other unknown TESSERA_ variable is an error: a mistyped TESSERA_DATABASE_URL must not start an
empty database.
"""

_TLS_NAMES: Final = {
    "tls_certificate": "server.pem",
    "tls_key": "server.key",
    "tls_client_authorities": "ca.pem",
    "ca_certificate": "ca.pem",
    "ca_key": "ca.key",
}
"""From a setting of TLS to the name of its file in ``tls_directory``."""

_Value = str | int | float | bool

_Threads = Annotated[int, whole_between(1, 1000)]
_LargeCount = Annotated[int, whole_between(1, 10**6)]
_Count = Annotated[int, whole_between(0, 2**31 - 1)]
_Limit = Annotated[int, whole_between(1, 2**31 - 1)]
_Seconds = Annotated[float, Field(ge=0, lt=1e6)]
_Positive = Annotated[float, Field(gt=0, lt=1e6)]
_Spacing = Annotated[float, Field(ge=0.1, lt=1e6)]
_Period = Annotated[float, Field(ge=1, lt=1e6)]
_Factor = Annotated[float, Field(gt=0, le=1e6)]
_Hours = Annotated[float, number_between(0.02, 24 * 365)]
_Days = Annotated[float, number_between(0.0, MAX_RETAINED_DAYS)]
_Instance = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9._-]{0,100}$"),
    described_as("must be at most 100 letters, digits, '-', '_' or '.'"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of TLS (PEM). A file that is not set is None."""

    certificate: Path
    key: Path
    client_authorities: Path | None
    ca_certificate: Path | None
    ca_key: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The server's settings. They can be printed: ``str`` and ``repr`` show no secret."""

    listen: str = "127.0.0.1:7070"
    """Host and port, or unix:/path. With port 0 the system chooses a free port."""
    socket: str = ""
    """Path of a Unix socket on which the server listens, too. Its directory must belong to the
    server's user alone. Callers there may do everything and need no token.
    """
    insecure: bool = False
    """Whether to listen on addresses that other machines can reach although callers need no token.
    Everybody who reaches the server may then do everything, so this must be allowed explicitly.
    """
    insecure_any_interface: bool = False
    """The earlier name of ``insecure``."""
    tls_directory: str = ""
    """Directory made by `tessera ca init`. It gives the next five settings their defaults: the files
    server.pem, server.key, ca.pem (twice) and ca.key in it.
    """
    tls_certificate: str = ""
    """The server's certificate with those of intermediate authorities (PEM). With it, the server
    takes only TLS connections, and every caller needs a token or a certificate. The files are read
    again when they change.
    """
    tls_key: str = ""
    """The private key of ``tls_certificate`` (PEM). Other users must not be able to read it."""
    tls_client_authorities: str = ""
    """The authorities whose certificates agents may have (PEM). With it, the server listens on
    ``mutual_listen``.
    """
    ca_certificate: str = ""
    """The certificate of the authority that signs the certificates of agents that enrol (PEM). If it
    is empty, agents cannot enrol: give them certificates of your own authority.
    """
    ca_key: str = ""
    """The private key of ``ca_certificate`` (PEM)."""
    mutual_listen: str = ""
    """Host and port for agents, where TLS asks for their certificates. If it is empty, the host of
    ``listen`` with the next port.
    """
    agent_certificate_hours: _Hours = 24.0
    """Lifetime of the certificates of agents in hours. Agents renew them after two thirds of it."""
    authenticate: bool = False
    """Whether callers need a token even without TLS, for example because other users of this machine
    can reach the server, or a proxy ends TLS. With TLS they always do.
    """
    oidc_issuer: str = ""
    """URL of the identity provider whose tokens (JWT) are accepted in addition to the server's own."""
    oidc_audience: str = ""
    """The audience that these tokens must be for."""
    oidc_client_id: str = ""
    """The client id of the command line at the identity provider, for `tessera login`."""
    oidc_scopes: str = "openid profile offline_access"
    """The scopes that `tessera login` asks for."""
    oidc_roles_claim: str = "roles"
    """The claim that names the caller's roles or groups. Dots lead into nested claims."""
    oidc_tenants_claim: str = "tenants"
    """The claim that names the tenants of viewers and users."""
    oidc_clusters_claim: str = ""
    """The claim that names the clusters that the caller sees. If it is empty, all clusters."""
    oidc_skew_s: _Seconds = 60.0
    """Largest difference in seconds between the clocks of the server and of the provider."""
    oidc_roles: str = ""
    """What the values of the roles claim stand for, e.g. "ml-admins=admin, everyone=user". If it is
    empty, they are the names of roles.
    """
    oidc_authorities: str = ""
    """File of the authorities (PEM) that the identity provider's certificate may be signed by. If it
    is empty, those of this machine.
    """
    oidc_default_role: str = ""
    """The role of callers without a known one. If it is empty, they are refused."""
    webhook_key_file: str = ""
    """A file with at least 32 random characters, the same for all replicas, from which the secrets of
    webhooks are derived. Other users must not be able to read it. If it is empty, there are no
    webhooks. With another key, all secrets change.
    """
    webhook_networks: str = ""
    """Networks that are not public, such as 10.0.0.0/8, to which webhooks may lead. If it is empty,
    webhooks lead to public addresses only.
    """
    webhook_plain_http: bool = False
    """Whether the URLs of webhooks may begin with http://. Others can then read what they are sent."""
    webhook_authorities: str = ""
    """File of the authorities (PEM) that certificates of webhooks' hosts may be signed by. If it is
    empty, those of this machine.
    """
    calls_per_minute: _Count = 6_000
    """Largest number of calls of a tenant in a minute, for callers who are viewers or users. 0: any
    number.
    """
    max_job_bytes: _Limit = 65_536
    """Largest size of a job's description, encoded as a message."""
    database_url: str = field(default="", repr=False)
    """URL of the database, postgresql://... If it is empty, the embedded database is used."""
    database_directory: str = ""
    """Data directory of the embedded database. If it is empty,
    ``tessera.db.embedded.default_directory`` chooses one.
    """
    store_threads: _Threads = 6
    """Number of short calls that use the database at the same time. Agents, leases and heavy calls
    have separate threads.
    """
    agent_threads: _Threads = 5
    """Number of calls of agents that use the database at the same time, at least 2.

    At least half of them may write, at most one for each cluster. Heartbeats have a separate
    thread.
    """
    round_threads: _Threads = 2
    """Number of rounds that callers commit and that are decided at the same time, at most one for
    each cluster. The same number of periodic rounds runs in threads reserved for them.
    """
    trial_threads: _Threads = 3
    """Number of dry runs, replays and previews that are decided at the same time. With three or
    more threads, one client or cluster holds at most all but one.
    """
    round_queue: _LargeCount = 64
    """Largest number of calls that wait for one of these threads. One client can have half."""
    solve_process_from_jobs: _Count = 0
    """Number of jobs from which a round is decided in a separate process, so that other calls stay
    fast during a long solve. 0 disables this. There are up to ``round_threads`` processes, each
    with its own memory.
    """
    period_s: _Seconds = 300.0
    """Seconds between periodic rounds of a cluster. Rounds also run after events. With 0, rounds run
    only on request.
    """
    round_spacing_s: _Spacing = 3.0
    """Least seconds between the beginnings of two rounds of a cluster, if events cause the second.
    All events in between share one round. Rounds on request and periodic rounds do not wait.
    """
    policy: str = ""
    """The standing policy of rounds: YAML or JSON with the names of the API's RoundOptions.

    An example is ``{objective: deadline then jct, queue_order: true, promote_after: 2h}``. Periodic
    rounds follow it, and it fills in what a Schedule call leaves open, in clusters whose policy nobody
    set with ``tessera policy``. If it is empty, the defaults of RoundOptions apply.
    """
    plugins: str = ""
    """Schedulers and objectives of your own that rounds may name, as a comma-separated list of
    MODULE:NAME. The server imports these modules when it starts, and runs their code as its own. A
    request that names any other module is refused. If it is empty, rounds may name no plug-in.
    """
    default_deadline_s: _Positive = 60.0
    """Deadline of a round for a call that has no deadline."""
    max_deadline_s: _Positive = 600.0
    """Longest deadline of a round. A call with a longer one gets the best answer found by then."""
    grace_s: _Seconds = 10.0
    """Time for which a stopping server waits for calls to finish."""
    forecast_period_s: _Seconds = 120.0
    """Time between forecasts of when jobs start and finish. If it is 0, or if there are no periodic
    rounds, no forecasts are made.
    """
    forecast_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of that time for which one forecast may use a core, at the lowest priority."""
    shadow_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the time for which the shadow of a cluster may use a core, at the lowest priority. If
    it is 0, shadows decide nothing.
    """
    estimate_cells: bool = True
    """Whether jobs without estimates get analytic ones, on all GPU types of their cluster. If false,
    those that state a GPU type run on their request at an unknown rate.
    """
    estimate_counts: str = "0.5, 1, 2"
    """GPU counts to estimate, as multiples of the job's request. Only whole results are used."""
    estimate_period_s: _Period = 60.0
    """Time between estimation passes. One also runs when a job without estimates is submitted."""
    learn: bool = True
    """Whether iteration times that jobs report correct the estimates of similar Cells."""
    profile: bool = False
    """Whether the layers of every workload are measured, and not only where jobs ask for it. The
    measuring tasks use one GPU of each type while no other job wants it.
    """
    profile_samples: str = "1, 2, 4, 8"
    """Numbers of samples to measure on the one GPU."""
    profile_tp: str = "1"
    """Tensor degrees to measure. Degrees above 1 need steps that take ``tp``."""
    profile_limit_s: _Positive = 1800.0
    """Time of all profiling tasks of a model together, from the first start of one of them. GPU types
    that were not finished by then stay analytic. The default is that of Crius and Arena.
    """
    profile_task_gpu_s: _Positive = 960.0
    """GPU-seconds of one profiling task. The default is what Arena's artifact charges for a profile."""
    profile_runs: int = 0
    """Number of plans that are measured by short runs of a job's own program, where a job asks for
    profiling. 0 for none. Seven are enough for all models of plans.
    """
    profile_run_s: _Positive = 120.0
    """Seconds of each of these runs, as predicted. The limits of profiling tasks hold for each."""
    check_collectives: bool = False
    """Whether the estimated collectives of published models are compared with those that XLA compiles
    for their JAX steps. Each comparison takes some tens of seconds of a core and needs the extra
    ``estimator``.
    """
    check_collectives_s: _Positive = 300.0
    """Time of one compilation for that, after which it is given up."""
    hardware: str = ""
    """A YAML file of GPU types in addition to the catalogue's (``estimator.hardware.files``). If it
    is empty, there are no others.
    """
    retain_requests_days: _Days = 1.0
    """Days for which a repeated request gets its first answer again. In this setting and the next
    six, 0 keeps everything for ever.
    """
    retain_rounds_days: _Days = 30.0
    """Days for which rounds with their decisions, and network plans, are kept. The last 100 of a
    cluster are always kept.
    """
    retain_rounds: _Count = 10_000
    """Number of latest rounds that are kept for each cluster. Older ones are deleted, however
    recent they are.
    """
    retain_snapshots: _Count = 2_000
    """Number of latest rounds of a cluster that can be replayed. Only they keep snapshots."""
    retain_jobs_days: _Days = 30.0
    """Days for which ended jobs are kept, and tokens that have ended. Older history of live jobs is
    deleted, too.
    """
    retain_usage_days: _Days = 1100.0
    """Days for which the daily sums of what deleted jobs have used are kept."""
    retain_audit_days: _Days = 365.0
    """Days for which entries of the audit log are kept."""
    max_clusters: _Limit = 1000
    """Largest number of clusters."""
    max_nodes: _Limit = 20_000
    """Largest number of nodes in a cluster, and largest number of agents."""
    max_models: _Limit = 1000
    """Largest number of models that users can describe in a cluster."""
    max_tenants: _Limit = 10_000
    """Largest number of tenants that can have settings in a cluster."""
    max_open_jobs: _Limit = 1_000_000
    """Largest number of live jobs of one tenant in a cluster."""
    health_period_s: _Positive = 5.0
    """Time between checks that the database is ready."""
    agent_streams: _LargeCount = 10_000
    """Largest number of agents' streams at the same time."""
    agent_streams_per_client: _LargeCount = 5_000
    """Largest number of these streams of one client: an identity, or else a host."""
    watches: _LargeCount = 2_000
    """Largest number of streams that watch jobs at the same time."""
    watches_per_client: _LargeCount = 200
    """Largest number of these streams of one client: an identity, or else a host."""
    unread_s: _Positive = 60.0
    """Time after which a stream ends if its client has not taken a message."""
    poll_s: _Positive = 1.0
    """Time after which a watched job is read again. Only changes of the desired state are notified,
    so the rest must be polled.
    """
    clock_factor: _Factor = 1.0
    """Seconds of training that agents replay in one second (their ``--clock-factor``). Rounds take
    jobs to be faster than their estimates by this factor. Periods, deadlines and waiting times are
    real time.
    """
    instance: _Instance = ""
    """The name of this server, which health checks report as ``tessera-instance`` in their initial
    metadata. A process that starts a server recognises it by this name. If it is empty, none is
    reported.
    """
    lease_s: float = 30.0
    margin_s: float = 15.0
    heartbeat_s: float = 5.0
    inspect_s: float = 20.0
    """``AgentTiming`` explains these four settings."""
    probation_s: _Seconds = 600.0
    """Time for which a node that a fault has drained must be healthy before it is undrained
    automatically.
    """

    def __post_init__(self) -> None:
        """Refuse values that have no meaning or would expose the server by accident."""
        check_value(entry_of(Config), "", {f.name: getattr(self, f.name) for f in fields(self)})
        load_plugins(self.plugins)  # the policy may name them
        self.agent_timing()
        self.round_options()
        self.estimate_multiples()
        self.profiling()
        if self.check_collectives and find_spec("jax") is None:
            raise InvalidInput(
                "check_collectives",
                f"needs JAX on the server; install it with {install_hint('estimator')}",
            )
        self.tls_files()
        self.oidc()
        self.webhook_options()
        allowed = self.insecure or self.insecure_any_interface or self.uses_tls()
        if not (allowed or is_on_this_machine(self.listen)):
            danger = (
                "tokens are sent in plain text" if self.authenticate else "callers need no token"
            )
            raise InvalidInput(
                "listen",
                f"{self.listen} can be reached from other machines, and {danger}; use TLS"
                " (make certificates with `tessera ca init DIR`, then add --tls DIR), listen on 127.0.0.1,"
                " or set insecure (--insecure) if you trust everybody on the network",
            )

    def __str__(self) -> str:
        """Return the settings as TOML, without secrets."""
        return "".join(f"{f.name} = {_toml(self.shown(f.name))}\n" for f in fields(self))

    def uses_tls(self) -> bool:
        """Return whether the server takes only TLS connections."""
        return bool(self.tls_directory or self.tls_certificate)

    def asks_callers(self) -> bool:
        """Return whether callers must prove who they are."""
        return self.uses_tls() or self.authenticate

    def tls_files(self) -> TlsFiles | None:
        """Return the files of TLS, or None without it.

        Raises:
            InvalidInput: some are set and others that they need are not.
        """
        folder = Path(self.tls_directory) if self.tls_directory else None

        def path(setting: str, name: str) -> Path | None:
            given = getattr(self, setting)
            return Path(given) if given else folder / name if folder else None

        files = {setting: path(setting, name) for setting, name in _TLS_NAMES.items()}
        for first, second in (("tls_certificate", "tls_key"), ("ca_certificate", "ca_key")):
            for one, other in ((first, second), (second, first)):
                if files[one] and not files[other]:
                    raise InvalidInput(other, f"must be set, since {one} is; they belong together")
        if files["tls_certificate"] is None or files["tls_key"] is None:
            for setting in ("tls_client_authorities", "ca_certificate", "mutual_listen"):
                if getattr(self, setting):
                    raise InvalidInput("tls_certificate", f"must be set, since {setting} is")
            return None
        return TlsFiles(
            certificate=files["tls_certificate"],
            key=files["tls_key"],
            client_authorities=files["tls_client_authorities"],
            ca_certificate=files["ca_certificate"],
            ca_key=files["ca_key"],
        )

    def mutual_address(self) -> str:
        """Return the address for agents: ``mutual_listen``, or the port after that of ``listen``."""
        host, _, port = self.listen.rpartition(":")
        if self.mutual_listen or not port.isdecimal():
            return self.mutual_listen
        return f"{host}:{int(port) + 1 if int(port) else 0}"

    def oidc(self) -> OidcSettings | None:
        """Return the identity provider and what its tokens mean, or None. Raises InvalidInput."""
        if not self.oidc_issuer:
            return None
        return OidcSettings(
            issuer=self.oidc_issuer,
            audience=self.oidc_audience,
            client_id=self.oidc_client_id,
            scopes=self.oidc_scopes,
            roles_claim=self.oidc_roles_claim,
            tenants_claim=self.oidc_tenants_claim,
            clusters_claim=self.oidc_clusters_claim,
            skew_s=self.oidc_skew_s,
            role_names=self.role_names(),
            default_role=self.oidc_default_role,
            authorities=self.oidc_authorities,
        )

    def role_names(self) -> dict[str, str]:
        """Return the role for each value of the roles claim. Raises InvalidInput."""
        known, names = {str(role) for role in PEOPLE}, dict[str, str]()
        if not self.oidc_roles.strip():
            return names
        for part in self.oidc_roles.split(","):
            value, equals, role = (text.strip() for text in part.partition("="))
            if not value or not equals or role not in known:
                raise InvalidInput(
                    "oidc_roles",
                    f"{part.strip()!r} must be VALUE=ROLE, with a role of {', '.join(PEOPLE)}",
                )
            names[value] = role
        return names

    def connections(self) -> int:
        """Return how many database connections are in use at the same time: one for each thread."""
        rounds = 2 * self.round_threads + self.trial_threads
        return self.store_threads + max(2, self.agent_threads) + rounds + OTHER_THREADS

    def agent_timing(self) -> AgentTiming:
        """Return the timing of agents' streams."""
        return AgentTiming(
            lease_s=self.lease_s,
            margin_s=self.margin_s,
            heartbeat_s=self.heartbeat_s,
            inspect_s=self.inspect_s,
        )

    def round_options(self) -> RoundOptions:
        """Return the standing policy.

        Its rounds last for the period unless the policy says otherwise.

        Raises:
            InvalidInput: it is not a policy, or it names an unknown solver or scheduler, or
                parameters that the scheduler does not accept.
        """
        options = read_options("policy", self.policy, self.usual_options())
        if options.solver not in solver_names():
            choices = ", ".join(solver_names())
            raise InvalidInput(
                "policy.solver", f"unknown {options.solver!r}; choose one of {choices}"
            )
        try:
            scheduler_of(options.scheduler, options.scheduler_parameters)
        except InvalidInput as wrong:
            raise InvalidInput(f"policy.{wrong.field}", wrong.problem) from wrong
        return options

    def round_limit_s(self) -> float:
        """Return the time that a periodic round may take."""
        return min(self.period_s or math.inf, self.default_deadline_s)

    def usual_options(self) -> RoundOptions:
        """Return the options that a policy does not set. Rounds last for the period."""
        return RoundOptions(round_s=self.period_s) if self.period_s else RoundOptions()

    def estimate_multiples(self) -> tuple[float, ...]:
        """Return the factors by which requested GPU counts are multiplied. Raises InvalidInput."""
        try:
            multiples = tuple(float(part) for part in self.estimate_counts.split(","))
        except ValueError:
            multiples = ()
        if not 1 <= len(multiples) <= MAX_MULTIPLES or not all(0 < x <= 1024 for x in multiples):
            raise InvalidInput(
                "estimate_counts",
                f"must be 1 to {MAX_MULTIPLES} numbers above 0 and up to 1,024, such as 0.5, 1, 2, 4",
            )
        return multiples

    def profiling(self) -> ProfilingOptions:
        """Return what is profiled and when. Raises InvalidInput."""
        numbers = {}
        for name in ("profile_samples", "profile_tp"):
            texts = [text.strip() for text in getattr(self, name).split(",")]
            if not all(t.isdecimal() and 1 <= int(t) <= MAX_PROFILED for t in texts):
                raise InvalidInput(
                    name, f"must be numbers from 1 to {MAX_PROFILED:,}, such as 1, 2"
                )
            numbers[name] = tuple(sorted({int(t) for t in texts}))
        if self.profile_runs and not FITTED_RUNS <= self.profile_runs <= MAX_RUNS:
            raise InvalidInput(
                "profile_runs",
                f"must be 0, or from {FITTED_RUNS}, which the models of plans need, to {MAX_RUNS}",
            )
        return ProfilingOptions(
            always=self.profile,
            samples=numbers["profile_samples"],
            tp=numbers["profile_tp"],
            runs=self.profile_runs,
            run_s=self.profile_run_s,
            limits=ProfilingLimits(
                workload_s=self.profile_limit_s, task_gpu_s=self.profile_task_gpu_s
            ),
        )

    def catalogue(self) -> dict[str, Hardware]:
        """Return the GPU types for which Cells can be estimated.

        Raises:
            InvalidInput: the file is wrong.
        """
        return catalogue_of(read_hardware(Path(self.hardware)) if self.hardware else CATALOGUE)

    def retention(self) -> Retention:
        """Return how much history the database keeps."""
        return Retention(
            requests_s=_days_s(self.retain_requests_days),
            rounds_s=_days_s(self.retain_rounds_days),
            least_rounds=MIN_KEPT_ROUNDS,
            most_rounds=self.retain_rounds or math.inf,
            most_snapshots=self.retain_snapshots or math.inf,
            jobs_s=_days_s(self.retain_jobs_days),
            audit_s=_days_s(self.retain_audit_days),
            usage_s=_days_s(self.retain_usage_days),
        )

    def webhook_options(self) -> SendingOptions:
        """Return where webhooks may lead. Raises InvalidInput."""
        return SendingOptions(
            plain_http=self.webhook_plain_http,
            networks=read_networks("webhook_networks", self.webhook_networks),
            authorities=self.webhook_authorities,
        )

    def limits(self) -> StoreLimits:
        """Return the largest numbers of things that users can create."""
        return StoreLimits(
            clusters=self.max_clusters,
            nodes=self.max_nodes,
            models=self.max_models,
            tenants=self.max_tenants,
            open_jobs=self.max_open_jobs,
        )

    def shown(self, name: str) -> str | int | float | bool:
        """Return the value of a setting without its secrets."""
        value: _Value = getattr(self, name)
        return without_password(str(value)) if name == "database_url" else value


def load_config(file: Path | None, environment: Mapping[str, str]) -> Config:
    """Return the settings from ``file``, overridden by ``environment``.

    If ``file`` is None, only the defaults and the environment count.

    Raises:
        InvalidInput: the file cannot be read, a key is unknown, or a value has the wrong type or
            range.
    """
    values = read_setting_file(file) if file is not None else {}
    return Config(**(values | read_setting_variables(environment)))


_TYPES: Final[dict[str, type[_Value]]] = get_type_hints(Config)


def read_setting_file(file: Path) -> dict[str, Any]:
    """Return the settings that a TOML file names. Raises InvalidInput."""
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(file), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(str(file), f"is not TOML: {error}") from error
    return check_fields(Config, str(file), settings)


def read_setting_variables(environment: Mapping[str, str]) -> dict[str, _Value]:
    """Return the settings that environment variables name. Raises InvalidInput."""
    values: dict[str, _Value] = {}
    for variable, text in environment.items():
        if variable.startswith(VARIABLE_PREFIX) and variable not in OTHER_VARIABLES:
            key = variable.removeprefix(VARIABLE_PREFIX).lower()
            if key not in _TYPES:
                known = [
                    *(VARIABLE_PREFIX + setting.upper() for setting in _TYPES),
                    *sorted(OTHER_VARIABLES),
                ]
                meant = suggest_name(variable, known) or "."
                raise InvalidInput(
                    variable, f"unknown setting{meant} The settings are {', '.join(known)}"
                )
            values[key] = _parsed(variable, text, _TYPES[key])
    return values


def _parsed(place: str, text: str, kind: type[_Value]) -> _Value:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InvalidInput(place, "must be true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise InvalidInput(place, f"must be {_type_in_words(kind)}") from None


def _type_in_words(kind: type[_Value]) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def _days_s(days: float) -> float:
    """Return days in seconds. 0 days are infinite."""
    return days * 86_400.0 if days else math.inf


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
