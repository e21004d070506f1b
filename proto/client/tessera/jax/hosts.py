"""The devices and hosts of a job: where they come from, and what hosts agree on."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from tessera import progress
from tessera.jax.errors import TrainingError

_VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"

MEETING_S = 300
"""Seconds for which a host waits for the others at the start."""


class HostsMissing(TrainingError):
    """An error for hosts that did not meet."""


def prepare_devices() -> None:
    """Meet the other hosts, and keep compiled programs. Call it before any other use of JAX.

    On a machine without GPUs, JAX gets a virtual device for each of the job's GPUs. Programs are
    kept in JAX_COMPILATION_CACHE_DIR, or else with the job's files, so that a later start under the
    same plan need not compile them again.

    Raises:
        HostsMissing: not all hosts came.
    """
    gpus = os.environ.get("TESSERA_NODE_GPUS", "")
    if gpus and _VIRTUAL_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", int(gpus))
    folder = jax.config.values["jax_compilation_cache_dir"]
    if "TESSERA_JOB_DIR" in os.environ and not folder:
        folder = str(progress.job_dir() / "compiled")
        jax.config.update("jax_compilation_cache_dir", folder)
    if folder:  # small programs, too
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _join_hosts()


def _join_hosts() -> None:
    """Meet the other hosts of the job, if it has several.

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
    raised = np.asarray(multihost_utils.process_allgather(np.array(flags)))
    return tuple(bool(raised[:, place].any()) for place in range(len(flags)))


def wait_for_hosts(place: str) -> None:
    """Return once all hosts have reached this place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def leads() -> bool:
    """Return whether this is the first host."""
    return bool(jax.process_index() == 0)
