"""The model of iteration time that a calibration corrects: plans with factors on their costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from tessera.estimator.calibration import Parameter, Subject
from tessera.estimator.cells import Setting, coarse_for
from tessera.estimator.planning.search import latency_of
from tessera.estimator.plans import COST_COLUMNS, Candidates, Groups, Primitive, StageCosts
from tessera.estimator.pricing.price import plan_costs, plan_seconds, plan_setting
from tessera.estimator.rooflines import (
    DEFAULT_RATES,
    ROOFLINE_PARTS,
    RooflineCompute,
    RooflinePart,
    RooflineRates,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.job.execution_plan import ExecutionPlan

PARAMETERS: Final = (
    Parameter(name="compute", value=1.0, shared_sd=0.1, family_sd=0.1, gpu_sd=0.05),
    Parameter(name="memory", value=1.0, shared_sd=0.15, family_sd=0.15, gpu_sd=0.05),
    Parameter(name="rows", value=1.0, shared_sd=0.3, family_sd=0.3, gpu_sd=0.2),
    Parameter(name="launch", value=1.0, shared_sd=0.5, family_sd=0.3, gpu_sd=0.2),
    Parameter(name="collectives", value=1.0, shared_sd=0.3, family_sd=0.15, gpu_sd=0.3),
    Parameter(name="transfers", value=1.0, shared_sd=0.3, family_sd=0.15, gpu_sd=0.3),
)
"""Factors on the seconds of the four parts of kernels, of collectives, and of transfers between
stages. The standard deviations are by judgement: compute is known to about a tenth, and
communication to a third."""
LOG_STEP: Final = 0.02
"""Step of a log parameter for its numerical derivative."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeParts:
    """The candidate stages of a coarse setting that fit somewhere, with the parts of their times."""

    setting: Setting
    costs: StageCosts  # at factors of one
    forward_s: Floats  # of each of ROOFLINE_PARTS, shape (4, K)
    backward_s: Floats  # with the repeated forward pass, if any; shape (4, K)
    depth: Ints  # of tessera.estimator.planning.options, shape (K,)

    @property
    def candidates(self) -> Candidates:
        """Return the candidates, which are the rows of the costs."""
        return self.costs.candidates

    def at(self, factors: Floats, rows: Ints | None = None) -> StageCosts:
        """Return the costs at factors in the order of :data:`PARAMETERS`.

        If ``rows`` is None, all rows are returned. Factors on kernels do not change the times of
        measured kernels.
        """
        costs = self.costs if rows is None else _select_rows(self.costs, rows)
        kernels = slice(None) if rows is None else rows
        compute, (collectives, transfers) = (
            factors[: len(ROOFLINE_PARTS)],
            factors[len(ROOFLINE_PARTS) :],
        )
        if self.setting.timed:
            compute = np.ones(len(ROOFLINE_PARTS))
        return replace(
            costs,
            forward_s=compute @ self.forward_s[:, kernels],
            backward_s=compute @ self.backward_s[:, kernels],
            comm_s=collectives * costs.comm_s,
            sync_s=collectives * costs.sync_s,
            send_s=transfers * costs.send_s,
            receive_s=transfers * costs.receive_s,
        )


class PlanChooser(Protocol):
    """A rule by which a runtime chooses its plan, possibly among several pipeline degrees."""

    def candidates(self, setting: Setting) -> Candidates:
        """Return the stages from which its plans may be built."""
        ...

    def plans(
        self, parts: TimeParts, factors: Floats, degrees: Sequence[int]
    ) -> list[tuple[float, Ints]]:
        """Return pairs of a likelihood and a plan, as rows of ``parts`` in order.

        If no plan fits, the list is empty.
        """
        ...


class CellTimes:
    """Iteration times of the plans that runtimes choose, as a
    :class:`tessera.estimator.calibration.TimeModel`."""

    def __init__(
        self,
        setting_of: Callable[[Subject], Setting],
        degrees_of: Callable[[Subject], Sequence[int]],
        chooser: PlanChooser,
        rates: Mapping[str, RooflineRates] = DEFAULT_RATES,
        parameters: Sequence[Parameter] = PARAMETERS,
    ) -> None:
        """Take the functions for the setting of a subject and for its possible pipeline degrees.

        The graph of a setting may already be coarse. Its compute is replaced by a roofline at
        ``rates``.
        """
        self._setting_of, self._degrees_of, self._rates = setting_of, degrees_of, rates
        self._chooser = chooser
        self._parameters = tuple(parameters)
        self._parts: dict[Subject, TimeParts] = {}

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Return the parameters, which are :data:`PARAMETERS` unless others were given."""
        return self._parameters

    def log_times(self, subjects: Sequence[Subject], log_values: Floats) -> tuple[Floats, Floats]:
        """Return log seconds, shape (K,), and gradients, shape (K, P), at the chosen plans.

        If several plans are likely, both are means over them. Gradients treat their shares as
        constants.
        """
        values = np.full(len(subjects), np.nan)
        gradients = np.full((len(subjects), len(self._parameters)), np.nan)
        for i, subject in enumerate(subjects):
            parts = self.parts(subject)
            if not len(parts.depth):
                continue
            at = log_values[i]
            plans = self._chooser.plans(parts, np.exp(at), self._degrees_of(subject))
            if plans:
                times = [_log_time(parts, rows, at) for _, rows in plans]
                share = np.array([likely for likely, _ in plans])
                values[i] = share @ np.array([value for value, _ in times])
                gradients[i] = share @ np.stack([gradient for _, gradient in times])
        return values, gradients

    def parts(self, subject: Subject) -> TimeParts:
        """Return the parts of a subject's times, cached as they do not depend on the parameters."""
        if subject not in self._parts:
            setting = self._setting_of(subject)
            deepest = max(self._degrees_of(subject))
            coarse = replace(setting, graph=coarse_for(setting.graph, deepest).graph)
            self._parts[subject] = parts_of(coarse, self._rates, self._chooser.candidates(coarse))
        return self._parts[subject]


class PlanTimes:
    """Iteration times of given plans, as a :class:`tessera.estimator.calibration.TimeModel`."""

    def __init__(
        self,
        plan_of: Callable[[Subject], tuple[Setting, ExecutionPlan]],
        rates: Mapping[str, RooflineRates] = DEFAULT_RATES,
    ) -> None:
        """Take the function for the setting and the plan of a subject.

        The compute of a setting is replaced by a roofline at ``rates``, unless it was measured.
        """
        self._plan_of, self._rates = plan_of, rates

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Return the parameters, which are :data:`PARAMETERS`."""
        return PARAMETERS

    def log_times(self, subjects: Sequence[Subject], log_values: Floats) -> tuple[Floats, Floats]:
        """Return log seconds, shape (K,), and gradients, shape (K, P), of the subjects' plans."""
        values = np.full(len(subjects), np.nan)
        gradients = np.full((len(subjects), len(PARAMETERS)), np.nan)
        steps = np.vstack([np.zeros(len(PARAMETERS)), LOG_STEP * np.eye(len(PARAMETERS))])
        for i, subject in enumerate(subjects):
            setting, plan = self._plan_of(subject)
            try:
                scaled = self._scaled_costs(setting, plan, np.exp(log_values[i] + steps))
            except InvalidInput:  # the plan cannot run here, so it has no time
                continue
            log_s = np.log(plan_seconds(setting, plan, scaled))
            values[i], gradients[i] = log_s[0], (log_s[1:] - log_s[0]) / LOG_STEP
        return values, gradients

    def _scaled_costs(self, setting: Setting, plan: ExecutionPlan, factors: Floats) -> StageCosts:
        """Return the costs of a plan's stages at factors (n, P), each of shape (n, stages)."""
        costs = plan_costs(setting, plan)
        kernels, (collectives, transfers) = np.ones((len(factors), 1)), factors.T[-2:, :, None]
        if not setting.timed:
            kernels = factors[:, : len(ROOFLINE_PARTS)] @ self._shares(setting, plan)
        return replace(
            costs,
            forward_s=kernels * costs.forward_s,
            backward_s=kernels * costs.backward_s,
            comm_s=collectives * costs.comm_s,
            sync_s=collectives * costs.sync_s,
            send_s=transfers * costs.send_s,
            receive_s=transfers * costs.receive_s,
            update_s=np.broadcast_to(costs.update_s, (len(factors), len(plan.stages))),
        )

    def _shares(self, setting: Setting, plan: ExecutionPlan) -> Floats:
        """Return the share of each of :data:`ROOFLINE_PARTS` in stages' kernels, shape (4, stages)."""
        graph, stages = plan_setting(setting, plan).graph, plan.stages
        roofline = RooflineCompute(hardware=setting.hardware, rates=self._rates)
        samples = np.array([plan.micro_batch / stage.dp for stage in stages])
        parts = roofline.parts_s(graph, samples, np.array([stage.tp for stage in stages]))
        running = np.concatenate([np.zeros((*parts.shape[:2], 1)), parts.cumsum(axis=2)], axis=2)
        rows = np.arange(len(stages))
        ends, starts = ([getattr(s, name) for s in stages] for name in ("end", "start"))
        own: Floats = running[:, rows, ends] - running[:, rows, starts]
        return np.asarray(own / own.sum(axis=0))


def parts_of(
    setting: Setting, rates: Mapping[str, RooflineRates], candidates: Candidates
) -> TimeParts:
    """Return the parts of those candidates of a coarse setting that fit somewhere.

    Measured kernels are not divided into parts. All their time counts as the first part.
    """
    whole = RooflineCompute(hardware=setting.hardware, rates=rates)
    costs = (setting if setting.timed else replace(setting, compute=whole)).costs(candidates)
    depth = setting.depths(costs)
    fits = np.flatnonzero(depth > 0).astype(np.int64)
    costs = _select_rows(costs, fits)
    if setting.timed:
        none = np.zeros((len(ROOFLINE_PARTS) - 1, len(fits)))
        return TimeParts(
            setting=setting,
            costs=costs,
            depth=depth[fits],
            forward_s=np.vstack([costs.forward_s, none]),
            backward_s=np.vstack([costs.backward_s, none]),
        )
    silent = replace(setting, network=_FreeNetwork())
    kernels = [
        replace(silent, compute=RooflinePart(whole=whole, part=part))
        for part in range(len(ROOFLINE_PARTS))
    ]
    priced = [part.costs(costs.candidates) for part in kernels]
    return TimeParts(
        setting=setting,
        costs=costs,
        depth=depth[fits],
        forward_s=np.stack([one.forward_s for one in priced]),
        backward_s=np.stack([one.backward_s for one in priced]),
    )


class _FreeNetwork:
    """A network that takes no time. It serves to cost kernels, which do not depend on collectives."""

    def seconds(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        return np.zeros(len(payload_bytes))


def _select_rows(costs: StageCosts, rows: Ints) -> StageCosts:
    """Return the costs at these rows."""
    return StageCosts(
        candidates=costs.candidates.rows(rows),
        **{name: getattr(costs, name)[rows] for name in COST_COLUMNS},
    )


def _log_time(parts: TimeParts, rows: Ints, log_values: Floats) -> tuple[float, Floats]:
    """Return the log seconds of a plan and their gradient, shape (P,)."""
    count, overlap = parts.setting.training.micro_batches, parts.setting.runtime.overlap
    order = np.arange(len(rows), dtype=np.int64)

    def log_s(at: Floats) -> float:
        return float(np.log(latency_of(parts.at(np.exp(at), rows), count, overlap).of(order)))

    value = log_s(log_values)
    moved = log_values + LOG_STEP * np.eye(len(log_values))
    return value, (np.array([log_s(at) for at in moved]) - value) / LOG_STEP
