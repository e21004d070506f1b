"""Models of reconfigurable training: iteration times of plans on GPUs, CPUs and bandwidths.

:func:`fit_pooled` is what estimates should use. ``fitting.fit_appendix`` is the published model.
"""

from tessera.estimator.reconfiguration.configurations import (
    Configuration,
    MachineRates,
    TransformerFacts,
)
from tessera.estimator.reconfiguration.fitting import AppendixFit, MeasuredRun, needs_refit
from tessera.estimator.reconfiguration.judging import (
    ModelChoice,
    PlanModel,
    PricedRun,
    choose_model,
)
from tessera.estimator.reconfiguration.pooling import PooledFit, choose_runs, fit_pooled

__all__ = [
    "AppendixFit",
    "Configuration",
    "MachineRates",
    "MeasuredRun",
    "ModelChoice",
    "PlanModel",
    "PooledFit",
    "PricedRun",
    "TransformerFacts",
    "choose_model",
    "choose_runs",
    "fit_pooled",
    "needs_refit",
]
