"""The specification that a keeper reads from its standard input, and the parts of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tessera.formulation.job.launch import LaunchSpec, launch_from_plain

ADDRESS = "@TESSERA_ADDRESS@"
PORT = "@TESSERA_PORT@"
"""Words that stand for the rendezvous, which is known only once the leader has published it."""

FILES = "{files}"
"""The place holder of the gang's private directory on the node, e.g. in ``{files}/NAME``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArguments:
    """The command that starts a launcher, with variables and files of its own.

    Words of ``argv`` name a file by ``{files}/NAME``. ``stdin`` is the text of its standard input.
    Lines of its output that begin with ``report_prefix`` are reports; if it is "", none are.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    report_prefix: str = ""

    def place_files(self, directory: str) -> LaunchArguments:
        """Return the same arguments with the files in ``directory``.

        Only names of ``files`` are replaced. Other words of the user stay as they are.
        """
        argv = list(self.argv)
        for name in self.files:
            argv = [word.replace(f"{FILES}/{name}", f"{directory}/{name}") for word in argv]
        return replace(self, argv=tuple(argv))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramUser:
    """A user of the operating system that programs run as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


@dataclass(frozen=True, kw_only=True)
class KeeperSpec:
    """Everything that a keeper needs to run a member's program.

    The words and variables of ``arguments`` may have ``ADDRESS`` and ``PORT``, which stand for the
    rendezvous. Its variables are all that the program gets from the agent. Paths are absolute.
    """

    runtime: str
    job: str
    generation: int
    job_number: int
    node_rank: int
    nodes: int
    ranks: tuple[int, ...]  # global ranks on this node, by local rank
    ranks_are_gpus: bool  # a launcher starts one process for each; if not, the program is the rank
    last_rank_reports: bool = False  # the last rank's output is searched for progress, too
    iterations_total: float = 0.0
    iter_time_s: float = 0.0  # expected; 0 if it is not known
    launch: LaunchSpec
    arguments: LaunchArguments
    user: ProgramUser
    directory: str  # the member's: progress.json, exit.json, processes.json; the agent's alone
    store: str  # the job's, shared by its nodes
    logs: str  # folder of the output of this generation
    mark: str  # found in the environment of each process of the member
    lease: str  # the agent's file with the end of its lease; "" without a lease
    address: str  # under which other nodes reach this one
    cores: tuple[int, ...] = ()  # () for all
    cgroup: str = ""  # "" without a limit on host memory
    tuning_s: float = 0.0  # for which the program may tune; 0 if it does not
    grace_s: float = 30.0  # between SIGTERM and SIGKILL
    checkpoint_s: float = 0.0  # seconds between requests for a checkpoint; 0 for none
    gather_s: float = 300.0  # for which members wait for the leader
    log_bytes: int = 64 << 20  # that are kept of each rank's output
    certificate: tuple[str, str] = field(default=("", ""))
    """Files of a certificate and its key for the endpoint of Trainer. "" turns it off."""
    trainer_token: str = ""  # which reports to that endpoint prove

    @property
    def leads(self) -> bool:
        """Return whether this member reports the job's progress."""
        return self.node_rank == 0

    @property
    def switches_user(self) -> bool:
        """Return whether the program runs as another user than the keeper."""
        return self.user.uid != os.geteuid()

    @property
    def owner(self) -> tuple[int, int] | None:
        """Return the user and the group of the program's files, or None for the keeper's own."""
        return (self.user.uid, self.user.gid) if self.switches_user else None

    @property
    def inbox(self) -> str:
        """Return the directory with files for the program, which it may only read."""
        return os.path.join(self.directory, "in")

    @property
    def outbox(self) -> str:
        """Return the directory in which the program writes its progress."""
        return os.path.join(self.directory, "out")

    def to_plain(self) -> dict[str, Any]:
        """Return the specification as JSON's plain values."""
        return asdict(self)


def spec_from_plain(plain: Mapping[str, Any]) -> KeeperSpec:
    """Return the specification that ``KeeperSpec.to_plain`` returned, as read from JSON."""
    parts = {
        "launch": launch_from_plain(plain["launch"]),
        "arguments": LaunchArguments(**_make_tuples(plain["arguments"])),
        "user": ProgramUser(**_make_tuples(plain["user"])),
    }
    return KeeperSpec(**_make_tuples(plain) | parts)


def _make_tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(v) if isinstance(v, list) else v for n, v in plain.items()}
