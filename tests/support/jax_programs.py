"""Training with JAX on virtual devices, in processes of its own: one runs many cases.

XLA fixes the number of devices when JAX starts in a process, so tests cannot train in theirs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.patience import PATIENCE_S

ROOT: Final = Path(__file__).parents[2]
FAST_COMPILATION: Final = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
"""Flags of XLA for programs that are compiled more than they run."""


def make_plan(
    *, dp: int = 1, tp: int = 1, ep: int = 1, sp: bool = False, accumulation: int = 1, **rest: Any
) -> dict[str, Any]:
    """Return a plan of one stage for the models of ``jax_models``, as JSON's plain values."""
    stage = {"start": 0, "end": 4, "dp": dp, "tp": tp, "ep": ep, "sp": sp}
    plan = {"stages": [stage], "micro_batch": 8 // accumulation, "accumulation": accumulation}
    return {**plan, "precision": "f32", **rest}


def train_cases(
    cases: Mapping[str, tuple[str, dict[str, Any]]],
    *,
    devices: int,
    processes: int = 1,
    iterations: int = 8,
) -> dict[str, Any]:
    """Train cases, given by a model's name and a plan, on ``devices`` in each of the processes.

    The results by names of cases have the loss of each iteration (``losses``), that of an
    evaluation after the last (``evaluation``) and a digest of the initial state (``start``). Those
    of several processes are checked to be equal.
    """
    work = json.dumps({"cases": cases, "iterations": iterations, "processes": processes})
    address = f"127.0.0.1:{_find_port()}"
    flags = f"--xla_force_host_platform_device_count={devices} {FAST_COMPILATION}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.jax_cases", address, str(rank)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        for process in started:
            assert process.stdin is not None
            process.stdin.write(work)
            process.stdin.close()
            process.stdin = None
        outputs = [process.communicate(timeout=4 * PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    results = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    assert all(result == results[0] for result in results)
    return dict(results[0])


def _find_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
