"""The devices and hosts of a job: where they come from, and what hosts agree on."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tessera import progress
from tessera.jax.errors import TrainingError

_VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"

MEETING_S = 300
"""Seconds for which a host waits for the others at the start."""

EXCHANGE_S = 1.0
"""About the seconds between two exchanges of requests, unless an iteration takes longer."""

RETRY_S = 0.5


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
    rank = int(os.environ["TESSERA_NODE_RANK"])
    if rank:
        _wait_for_coordinator(address)
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=hosts,
            process_id=rank,
            initialization_timeout=MEETING_S,
        )
    except (RuntimeError, ValueError) as error:
        raise HostsMissing(
            f"the {hosts} hosts did not meet at {address} within {MEETING_S} s: {error}"
        ) from error


def _wait_for_coordinator(address: str) -> None:
    """Return once the first host listens. JAX itself would end the process if it never does.

    Raises:
        HostsMissing: it does not listen in time.
    """
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + MEETING_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=MEETING_S).close()
            return
        except OSError as error:
            if time.monotonic() > until_s:
                raise HostsMissing(
                    f"the first host did not listen at {address} within {MEETING_S} s: {error}"
                ) from error
        time.sleep(RETRY_S)


def is_any_host(flag: bool) -> bool:
    """Return whether the flag is raised on any host. All hosts must call this at the same time."""
    if jax.process_count() == 1:
        return flag
    return bool(np.asarray(multihost_utils.process_allgather(np.array(flag))).any())


def find_largest_of_hosts(value: float) -> float:
    """Return the largest value of all hosts, in float32 if there are several."""
    if jax.process_count() == 1:
        return value
    return float(np.max(multihost_utils.process_allgather(np.float32(value))))


def take_from_first_host(value: Any) -> Any:
    """Return the first host's value, which JSON can hold, on all hosts."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    own = np.zeros(size, dtype=np.uint8)
    own[: min(size, len(text))] = text[:size]
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(own))))


class RequestExchange:
    """The exchange of requests between hosts, so that all act after the same iteration.

    An exchange waits for the iteration that runs. So hosts exchange about once in ``EXCHANGE_S``:
    each time, the first host says after how many iterations the next exchange is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0
        self._last: tuple[int, float] | None = None  # iterations and seconds of the last exchange

    def take(self, done: int, checkpoint: bool, stop: bool) -> tuple[bool, bool]:
        """Return whether to write a checkpoint and whether to stop after ``done`` iterations.

        A checkpoint is the first host's to ask for, and any host may ask for a stop. Requests that
        come between two exchanges wait for the next one.
        """
        if jax.process_count() == 1:
            return checkpoint, stop
        if done < self._next:
            return False, False
        own = np.array([checkpoint, stop, self._next_pause(done)], dtype=np.int64)
        rows = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, len(own))
        self._next = done + int(rows[0, 2])
        return bool(rows[0, 0]), bool(rows[:, 1].any())

    def _next_pause(self, done: int) -> int:
        """Return the iterations until the next exchange, by the pace since the last one."""
        now_s, last = self._clock(), self._last
        self._last = done, now_s
        if last is None or now_s <= last[1]:
            return 1
        return max(1, round(EXCHANGE_S * (done - last[0]) / (now_s - last[1])))


def wait_for_hosts(place: str) -> None:
    """Return once all hosts have reached this place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def is_first_host() -> bool:
    """Return whether this is the first host."""
    return bool(jax.process_index() == 0)
