"""The processes that ``tessera up`` starts, and their settings."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.db.schema import embedded
from tessera.formulation.base.errors import Unavailable
from tessera.service.agent.files import make_private, open_private
from tessera.service.cli.children import Child, run_child
from tessera.service.cli.clusters.clusterfile import ClusterFile
from tessera.service.cli.names import short_name
from tessera.service.cli.servers.up.home import DataDirectory

GRACE_S: Final = 15.0
"""Seconds that the server may take to stop before it is killed."""

GANG_GRACE_S: Final = 20.0
"""Seconds that a gang may take to stop before its agent kills it. Replayed jobs stop at once."""

AGENT_MARGIN_S: Final = 10.0
"""Seconds after that in which an agent has ended, too."""

MAX_SOCKET_PATH: Final = 100
"""Longest path of a Unix socket in bytes. With a longer one, the server listens on its port alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStart:
    """The processes to start, with their settings."""

    home: DataDirectory
    name: str  # clusters/{cluster}
    described: ClusterFile
    agents: int
    clock_factor: float
    period_s: float
    policy: str
    address: str
    instance: str  # the id by which the server is recognised
    insecure: bool
    database_url: str  # "" for the embedded database
    again: str  # the command that continues with the same data directory


class EmbeddedDatabase:
    """The embedded database in ``directory``, which is running once this is made.

    ``started_again`` is called when it runs again after it had ended.

    Raises:
        Unavailable: it does not start.
    """

    name = "the database"

    def __init__(self, directory: Path) -> None:
        self._directory, self._failure = directory, ""
        self.started_again: Callable[[], None] = lambda: None
        self.url = embedded.start_server(directory)
        self.log = directory / "log"
        self._process = embedded.find_process(directory)

    def find_ending(self) -> str:
        """Return how the database ended, or "" while it runs."""
        if self._failure:
            return self._failure
        return "" if embedded.is_alive(self._process) else "has ended"

    def start(self) -> None:
        """Start the database again, once what is left of it is gone."""
        try:
            embedded.start_server(self._directory, create=False)
            self._process = embedded.find_process(self._directory)
            self.started_again()
            self._failure = ""
        except Unavailable as error:
            self._failure = f"does not start ({error.__cause__ or error})"


@contextlib.contextmanager
def run_database(directory: Path) -> Iterator[EmbeddedDatabase]:
    """Run an embedded database in ``directory`` inside the block."""
    database = EmbeddedDatabase(directory)
    try:
        yield database
    finally:
        embedded.stop_server(directory)


def run_server(plan: ClusterStart, url: str) -> contextlib.AbstractContextManager[Child]:
    """Run the server on the database at ``url``."""
    arguments = ["serve", "--listen", plan.address, "--period", f"{plan.period_s:g}s"]
    arguments += ["--insecure"] if plan.insecure else []
    socket = plan.home.path / "run" / "server.sock"
    if len(os.fsencode(socket)) <= MAX_SOCKET_PATH:
        arguments += ["--socket", str(socket)]
    settings = {
        "TESSERA_DATABASE_URL": url,
        "TESSERA_POLICY": plan.policy,
        "TESSERA_INSTANCE": plan.instance,
        "TESSERA_CLOCK_FACTOR": f"{plan.clock_factor!r}",
    }
    return run_child(
        "server",
        "tessera.service.cli.main",
        arguments,
        plan.home.path / "logs",
        GRACE_S,
        settings,
        keep_open=[plan.home.lock_fd],
        started=plan.home.add_running,
    )


def run_agent(plan: ClusterStart, number: int) -> contextlib.AbstractContextManager[Child]:
    """Run an agent for its share of the nodes. Its gangs end with it."""
    cluster, agent = short_name(plan.name), f"agent-{number}"
    folder = plan.home.path / "agents" / cluster
    make_private(str(folder))
    listed = folder / f"{agent}.json"
    rows = [
        {"node": n.name, "gpu_type": n.gpu_type, "gpus": n.gpus, "rack": n.rack}
        for n in plan.described.nodes[number :: plan.agents]
    ]
    with open(open_private(str(listed)), "w", encoding="utf-8") as file:
        json.dump(rows, file)
    arguments = [
        "--server",
        plan.address,
        "--cluster",
        cluster,
        "--agent-id",
        agent,
        "--nodes-file",
        str(listed),
        "--data-dir",
        str(folder / agent),
        "--checkpoint-dir",
        str(plan.home.path / "checkpoints"),
        "--clock-factor",
        f"{plan.clock_factor:g}",
        "--grace-s",
        f"{GANG_GRACE_S:g}",
        "--run-as",
        pwd.getpwuid(os.geteuid()).pw_name,
        "--stop-on-exit",
    ]
    return run_child(
        agent,
        "tessera.service.agent.main",
        arguments,
        plan.home.path / "logs",
        GANG_GRACE_S + AGENT_MARGIN_S,
        {"TESSERA_DATABASE_URL": None},  # agents run users' processes
        keep_open=[plan.home.lock_fd],
        started=plan.home.add_running,
    )
