"""The specification that a keeper reads from its standard input."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class KeeperSpec:
    """Everything that a keeper needs to run a member's program.

    ``argv`` and ``environment`` may have ``ADDRESS`` and ``PORT``, the words below, which stand for
    the rendezvous. Paths are absolute.
    """

    runtime: str
    job: str
    generation: int
    job_number: int
    node_rank: int
    nodes: int
    ranks: tuple[int, ...]  # global ranks on this node, by local rank
    ranks_are_gpus: bool  # a launcher starts one process for each; if not, the program is the rank
    directory: str  # the member's: progress.json, exit.json, processes.json; the agent's alone
    inbox: str  # a directory with files for the program, which it may only read
    outbox: str  # a directory in which the program writes its progress
    store: str  # the job's, shared by its nodes
    logs: str  # folder of the output of this generation
    mark: str  # found in the environment of each process of the member
    lease: str  # the agent's file with the end of its lease; "" without a lease
    address: str  # under which other nodes reach this one
    argv: tuple[str, ...]
    environment: dict[str, str]
    last_rank_reports: bool = False  # the last rank's output is searched for progress, too
    stdin: str = ""  # the text of the program's standard input
    report_prefix: str = ""  # of lines of the first rank's output that are reports; "" for none
    staging: tuple[str, ...] = ()
    workdir: str = ""  # "" for the job's shared directory
    user: str = ""  # the name of the program's user
    uid: int = -1  # -1: as the keeper's own user
    gid: int = -1
    groups: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()  # () for all
    cgroup: str = ""  # "" without a limit on host memory
    iterations_total: float = 0.0
    until_exit: bool = False  # whether the program decides when the job is done
    iter_time_s: float = 0.0  # expected; 0 if it is not known
    progress_pattern: str = ""
    stall_limit_s: float = 0.0  # 0 for the default
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
        return self.uid >= 0

    @property
    def program_uid(self) -> int:
        """Return the number of the program's user."""
        return self.uid if self.switches_user else os.geteuid()

    def to_plain(self) -> dict[str, Any]:
        """Return the specification as JSON's plain values."""
        return asdict(self)


ADDRESS = "@TESSERA_ADDRESS@"
PORT = "@TESSERA_PORT@"
"""Words that stand for the rendezvous, which is known only once the leader has published it."""


def spec_from_plain(plain: dict[str, Any]) -> KeeperSpec:
    """Return the specification that ``KeeperSpec.to_plain`` returned, as read from JSON."""
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in plain.items()}
    return KeeperSpec(**values)
