"""Sums of profiled layers compared with directly measured steps, in error and in device time.

This is the only section that measures something on the machine. On a CPU it measures small models,
on an accelerator the smallest sizes of the papers. It measures in a separate process, which holds
the device no longer than necessary and keeps JAX out of this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.formulation.errors import Unavailable
from tessera.formulation.release import install_hint

SECTION_NAME = "profiled"


def run_profiled_section(
    data: Path,
    seeds: Sequence[int],
    *,
    models: Sequence[Any] = (),
    date: str = "",
    records: Path | None = None,
) -> EstimatorSection:
    """Return the errors of sums of profiled layers, and the device seconds of both methods.

    Nothing is read from ``data``, and times do not depend on ``seeds``. ``models`` is as in
    ``tessera.estimator.profiling.compare``. ``records`` is a file to which the profile is appended.

    Raises:
        Unavailable: the measuring process failed.
    """
    if find_spec("jax") is None:
        reason = f"JAX is not installed; install it with {install_hint('estimator')}"
        return EstimatorSection(figures={}, rows=[{"section": SECTION_NAME, "skipped": reason}])
    request = {"models": list(models), "date": date, "records": str(records) if records else ""}
    done = subprocess.run(
        [sys.executable, "-m", "tessera.estimator.profiling.compare"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"measuring failed: {last}")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    if "error" in report:
        raise Unavailable(f"measuring failed: {report['error']}")
    return summarize_report(report)


def summarize_report(report: Mapping[str, Any]) -> EstimatorSection:
    """Return the section for a report of ``tessera.estimator.profiling.compare``.

    ``profiled_error`` is the error of the forward and backward passes. ``profiled_step_error``
    includes the update of the weights. ``profiled_saving`` is the device seconds of measuring whole
    steps over those of profiling layers.
    """
    result = report["comparisons"]
    columns = {
        name: np.array([c[name] for c in result], dtype=np.float64)
        for name in (
            "summed_s",
            "passes_s",
            "update_s",
            "step_s",
            "profile_device_s",
            "direct_device_s",
        )
    }
    passes = columns["summed_s"] / columns["passes_s"] - 1
    steps = (columns["summed_s"] + columns["update_s"]) / columns["step_s"] - 1
    profile_s, direct_s = columns["profile_device_s"].sum(), columns["direct_device_s"].sum()
    rows = [
        {
            "section": SECTION_NAME,
            "device": report["device"],
            **c,
            "error": float(passes[n]),
            "step_error": float(steps[n]),
        }
        for n, c in enumerate(result)
    ]
    return EstimatorSection(
        figures={
            "profiled_error": float(np.abs(passes).mean()),
            "profiled_step_error": float(np.abs(steps).mean()),
            "profiled_worst_error": float(np.abs(steps).max()),
            "profile_device_s": float(profile_s),
            "direct_device_s": float(direct_s),
            "profiled_saving": float(direct_s / profile_s),
        },
        rows=rows,
    )
