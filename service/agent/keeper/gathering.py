"""The meeting of a gang's members: the leader says where, and from which checkpoint to go on."""

from __future__ import annotations

import socket
import time

from tessera.service.agent.keeper.children import ProgramNotStarted
from tessera.service.agent.keeper.store import Rendezvous

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tessera.service.agent.keeper.spec import KeeperSpec
    from tessera.service.agent.keeper.store import Checkpoint, JobStore

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0
"""Seconds between two looks for the rendezvous, which double from the first to the last."""


def gather(
    spec: KeeperSpec,
    store: JobStore,
    checkpoint: Checkpoint | None,
    is_stopped: Callable[[], bool],
) -> Rendezvous | None:
    """Return where the members meet, or None if a stop was requested meanwhile.

    The leader publishes it, with ``checkpoint``. The others wait for it.

    Raises:
        ProgramNotStarted: the leader did not come in time.
    """
    if spec.leads:
        meeting = Rendezvous(
            address=spec.address,
            port=find_port(spec.address),
            resume_from=checkpoint.path if checkpoint else "",
            resume_iterations=checkpoint.iterations if checkpoint else 0,
        )
        store.publish(meeting)
        return meeting
    until_s, pause_s = time.monotonic() + spec.gather_s, FIRST_PAUSE_S
    while (found := store.find_rendezvous()) is None:
        if is_stopped():
            return None
        if time.monotonic() > until_s:
            raise ProgramNotStarted(
                f"the leader of the gang did not come within {spec.gather_s:g} s; is {store.directory}"
                " the same directory on all nodes?"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
    return found


def find_port(address: str) -> int:
    """Return a TCP port that is free on ``address`` at present. Raises ProgramNotStarted."""
    try:
        family = socket.getaddrinfo(address, None)[0][0]
        with socket.socket(family) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ProgramNotStarted(
            f"cannot listen on {address}: {error}; start the agent with --address and an address of its"
            " node"
        ) from error
