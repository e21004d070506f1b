"""The estimates that the server makes, and what it measures for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.estimator.hardware import CATALOGUE, Hardware
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.hardware.files import read_hardware
from tessera.estimator.profiling.limits import ProfilingLimits
from tessera.estimator.profiling.tasks import ProfilingOptions
from tessera.estimator.reconfiguration.fitting import FITTED_RUNS
from tessera.estimator.reconfiguration.judging import MAX_RUNS
from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.settings.values import PeriodSeconds, PositiveSeconds

MAX_MULTIPLES: Final = 16
"""Largest number of entries in ``estimate_counts``, which are multiples of a job's request."""

MAX_PROFILED: Final = 4096
"""Largest number of samples in ``profile_samples``, and largest tensor degree in ``profile_tp``."""


@dataclass(frozen=True, kw_only=True)
class EstimateSettings:
    """Automatic estimates, profiling and further GPU types."""

    estimate_cells: bool = True
    """Whether jobs without estimates get analytic ones, on all GPU types of their cluster. If false,
    those that state a GPU type run on their request at an unknown rate.
    """
    estimate_counts: str = "0.5, 1, 2"
    """GPU counts to estimate, as multiples of the job's request. Only whole results are used."""
    estimate_period_s: PeriodSeconds = 60.0
    """Time between estimation passes. One also runs when a job without estimates is submitted."""
    learn: bool = True
    """Whether iteration times that jobs report correct the estimates of similar Cells."""
    profile: bool = False
    """Whether the layers of every workload are measured, and not only where jobs ask for it. The
    measuring tasks use one GPU of each type while no other job wants it.
    """
    profile_samples: str = "1, 2, 4, 8"
    """Numbers of samples to measure on the one GPU."""
    profile_tp: str = "1"
    """Tensor degrees to measure. Degrees above 1 need steps that take ``tp``."""
    profile_limit_s: PositiveSeconds = 1800.0
    """Time of all profiling tasks of a model together, from the first start of one of them. GPU types
    that were not finished by then stay analytic. The default is that of Crius and Arena.
    """
    profile_task_gpu_s: PositiveSeconds = 960.0
    """GPU-seconds of one profiling task. The default is what Arena's artifact charges for a profile."""
    profile_runs: int = 0
    """Number of plans that are measured by short runs of a job's own program, where a job asks for
    profiling. 0 for none. Seven are enough for all models of plans.
    """
    profile_run_s: PositiveSeconds = 120.0
    """Seconds of each of these runs, as predicted. The limits of profiling tasks hold for each."""
    hardware: str = ""
    """A YAML file of GPU types in addition to the catalogue's (``estimator.hardware.files``). If it
    is empty, there are no others.
    """

    def estimate_multiples(self) -> tuple[float, ...]:
        """Return the factors by which requested GPU counts are multiplied. Raises InvalidInput."""
        try:
            multiples = tuple(float(part) for part in self.estimate_counts.split(","))
        except ValueError:
            multiples = ()
        if not 1 <= len(multiples) <= MAX_MULTIPLES or not all(0 < x <= 1024 for x in multiples):
            raise InvalidInput(
                "estimate_counts",
                f"must be 1 to {MAX_MULTIPLES} numbers above 0 and up to 1,024, such as 0.5, 1, 2, 4",
            )
        return multiples

    def profiling(self) -> ProfilingOptions:
        """Return what is profiled and when. Raises InvalidInput."""
        numbers = {}
        for name in ("profile_samples", "profile_tp"):
            texts = [text.strip() for text in getattr(self, name).split(",")]
            if not all(t.isdecimal() and 1 <= int(t) <= MAX_PROFILED for t in texts):
                raise InvalidInput(
                    name, f"must be numbers from 1 to {MAX_PROFILED:,}, such as 1, 2"
                )
            numbers[name] = tuple(sorted({int(t) for t in texts}))
        if self.profile_runs and not FITTED_RUNS <= self.profile_runs <= MAX_RUNS:
            raise InvalidInput(
                "profile_runs",
                f"must be 0, or from {FITTED_RUNS}, which the models of plans need, to {MAX_RUNS}",
            )
        return ProfilingOptions(
            always=self.profile,
            samples=numbers["profile_samples"],
            tp=numbers["profile_tp"],
            runs=self.profile_runs,
            run_s=self.profile_run_s,
            limits=ProfilingLimits(
                workload_s=self.profile_limit_s, task_gpu_s=self.profile_task_gpu_s
            ),
        )

    def catalogue(self) -> dict[str, Hardware]:
        """Return the GPU types for which Cells can be estimated.

        Raises:
            InvalidInput: the file is wrong.
        """
        return catalogue_of(read_hardware(Path(self.hardware)) if self.hardware else CATALOGUE)
