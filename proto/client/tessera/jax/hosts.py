"""The hosts of a job: their meeting, and what they agree on."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from tessera.jax.errors import TrainingError

MEETING_S = 300
"""Seconds for which a host waits for the others at the start."""


class HostsMissing(TrainingError):
    """An error for hosts that did not meet."""


def join_hosts() -> None:
    """Meet the other hosts of the job, if it has several. Call it before any other use of JAX.

    Raises:
        HostsMissing: not all hosts came.
    """
    hosts = int(os.environ.get("TESSERA_NODES", "1"))
    address = os.environ.get("TESSERA_COORDINATOR", "")
    if hosts == 1 or not address or jax.distributed.is_initialized():
        return
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is a request to stop
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=hosts,
            process_id=int(os.environ["TESSERA_NODE_RANK"]),
            initialization_timeout=MEETING_S,
        )
    except (RuntimeError, ValueError) as error:
        raise HostsMissing(
            f"the {hosts} hosts did not meet at {address} within {MEETING_S} s: {error}"
        ) from error


def agree(*flags: bool) -> tuple[bool, ...]:
    """Return which flags are raised on any host. All hosts must call this at the same iteration."""
    if jax.process_count() == 1:
        return flags
    raised = multihost_utils.process_allgather(np.array(flags))
    return tuple(bool(flag) for flag in np.asarray(raised).any(axis=0))


def wait_for_hosts(place: str) -> None:
    """Return once all hosts have reached this place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def leads() -> bool:
    """Return whether this is the first host."""
    return bool(jax.process_index() == 0)
