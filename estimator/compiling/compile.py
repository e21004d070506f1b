"""Compilation of a step for ``dp * tp`` absent devices in a separate process.

XLA fixes the number of host devices when JAX starts, so each compilation has its own process. This
module does not import JAX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tessera.estimator.compiling.cache import default_folder
from tessera.estimator.compiling.compiled import CompiledStep, Uncompilable, from_json
from tessera.formulation.errors import Unavailable
from tessera.formulation.release import install_hint


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
    request: CompileRequest, folder: Path | None = None, *, timeout_s: float = 1800.0
) -> CompiledStep:
    """Return the compiled step. ``folder`` is the cache, by default the user's.

    Raises:
        Uncompilable: the step cannot be compiled; the message says why and what to do.
        Unavailable: JAX is not installed.
    """
    if find_spec("jax") is None:
        raise Unavailable(f"JAX cannot be imported; install it with {install_hint('estimator')}")
    if request.dp < 1 or request.tp < 1:
        raise Uncompilable(f"dp {request.dp} and tp {request.tp} must be at least 1")
    given = json.dumps(asdict(request) | {"folder": str(folder or default_folder())})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tessera.estimator.compiling.worker"],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=_environment(request.dp * request.tp),
        )
    except subprocess.TimeoutExpired as error:
        raise Uncompilable(
            f"compiling {request.target} took longer than {timeout_s:.0f} s; allow more time or make"
            " the step smaller"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Uncompilable(
            f"compiling {request.target} for {request.dp} x {request.tp} devices failed: {last}"
        )
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if "error" in answer:
        raise Uncompilable(answer["error"])
    return from_json(answer["compiled"], cached=answer["cached"])


def _environment(devices: int) -> dict[str, str]:
    """Return the environment of the compiling process, with one CPU device for each device."""
    flags = os.environ.get("XLA_FLAGS", "")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
    }
