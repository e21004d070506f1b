"""Tasks on a Ray cluster, which is an optional extra."""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.formulation.release import install_hint
from tessera.simulator.sweeps.tasks import (
    ONE_THREAD,
    Task,
    TaskOutcome,
    answer_call,
    package_folders,
)


def ray_outcomes(
    tasks: Sequence[Task], address: str, limit: int | None = None
) -> Generator[TaskOutcome, None, None]:
    """Yield each task's outcome as it ends. Closing the iterator cancels the tasks that run.

    Our code is sent to the nodes and replaces any version that is installed there. The libraries
    that it needs and the files that options name must already be on the nodes. A task takes one CPU,
    and at most ``limit`` tasks run at a time. Ray repeats tasks whose node was lost.
    """
    ray = import_ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address)
    remote = ray.remote(num_cpus=1)(answer_call)
    waiting, running = deque(tasks), dict[Any, Task]()
    try:
        while waiting or running:
            while waiting and len(running) < (limit or len(tasks)):
                task = waiting.popleft()
                running[remote.remote(task.call)] = task
            done, _ = ray.wait(list(running), num_returns=1)
            yield _outcome(ray, done[0], running.pop(done[0]))
    finally:
        for left in running:
            ray.cancel(left, force=True)
        if ours:
            ray.shutdown()


def import_ray() -> Any:
    """Return the module ``ray``, or raise InvalidInput with a hint on how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InvalidInput(
            "--ray", f"needs the extra 'ray': {install_hint('server', 'ray')}"
        ) from error


def _connect(ray: Any, address: str) -> None:
    environment = {"py_modules": [str(p) for p in package_folders()], "env_vars": dict(ONE_THREAD)}
    try:
        ray.init(
            address=address,
            runtime_env=environment,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError) as error:
        raise Unavailable(
            f"no Ray cluster answers at {address}: {error}; find its address with `ray status`, and"
            " set RAY_AUTH_MODE=token if the cluster asks for a token"
        ) from error


def _outcome(ray: Any, reference: Any, task: Task) -> TaskOutcome:
    try:
        return TaskOutcome(task=task, result=ray.get(reference))
    except ray.exceptions.RayError as error:
        return TaskOutcome(task=task, failure=str(error))
