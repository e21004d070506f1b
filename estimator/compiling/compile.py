"""Compilation of a step for ``dp * tp`` absent devices in a separate process.

XLA fixes the number of host devices when JAX starts, so each compilation has its own process. This
module does not import JAX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tessera.estimator.compiling.cache import default_folder
from tessera.estimator.compiling.compiled import CompiledStep, Uncompilable, from_json
from tessera.formulation.cancellation import never_cancelled, require_caller
from tessera.formulation.errors import Unavailable
from tessera.formulation.release import install_hint

POLL_S: Final = 0.5
"""Seconds between looks at whether a compilation was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """A step as ``module:function`` with its arguments, and the devices over which it is divided.

    ``dp`` devices share the batch, and ``tp`` devices the tensors (and experts), by Megatron's rule
    (:mod:`tessera.estimator.programs.parallel`). ``zero`` also divides gradients and optimizer
    states over ``dp`` (ZeRO, SC 2020, stage 2). The optimizer is Adam with moments of 32 bits.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    dp: int = 1
    tp: int = 1
    zero: bool = False


def compile_step(
    request: CompileRequest,
    folder: Path | None = None,
    *,
    timeout_s: float = 1800.0,
    cancelled: Callable[[], bool] = never_cancelled,
) -> CompiledStep:
    """Return the compiled step. ``folder`` is the cache, by default the user's.

    Raises:
        Uncompilable: the step cannot be compiled; the message says why and what to do.
        Unavailable: JAX is not installed.
        DeadlineTooShort: it was cancelled. The process is then gone.
    """
    if find_spec("jax") is None:
        raise Unavailable(f"JAX cannot be imported; install it with {install_hint('estimator')}")
    if request.dp < 1 or request.tp < 1:
        raise Uncompilable(f"dp {request.dp} and tp {request.tp} must be at least 1")
    given = json.dumps(asdict(request) | {"folder": str(folder or default_folder())})
    try:
        status, answered, errors = _run_worker(
            given, _environment(request.dp * request.tp), timeout_s, cancelled
        )
    except subprocess.TimeoutExpired as error:
        raise Uncompilable(
            f"compiling {request.target} took longer than {timeout_s:.0f} s; allow more time or make"
            " the step smaller"
        ) from error
    if status != 0:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise Uncompilable(
            f"compiling {request.target} for {request.dp} x {request.tp} devices failed: {last}"
        )
    answer = json.loads(answered.strip().splitlines()[-1])
    if "error" in answer:
        raise Uncompilable(answer["error"])
    return from_json(answer["compiled"], cached=answer["cached"])


def _run_worker(
    given: str, environment: Mapping[str, str], timeout_s: float, cancelled: Callable[[], bool]
) -> tuple[int, str, str]:
    """Return the exit status of the compiling process, and what it wrote to stdout and stderr.

    Raises:
        TimeoutExpired: it took longer than ``timeout_s``.
        DeadlineTooShort: it was cancelled.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "tessera.estimator.compiling.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        left_s, sent = timeout_s, given or None
        try:
            while True:
                require_caller(cancelled)
                try:
                    answered, errors = process.communicate(sent, timeout=min(POLL_S, left_s))
                except subprocess.TimeoutExpired:
                    left_s, sent = left_s - POLL_S, None
                    if left_s <= 0:
                        raise
                    continue
                return process.returncode, answered, errors
        finally:
            process.kill()  # of no effect once it has ended


def _environment(devices: int) -> dict[str, str]:
    """Return the environment of the compiling process, with one CPU device for each device."""
    flags = os.environ.get("XLA_FLAGS", "")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
    }
