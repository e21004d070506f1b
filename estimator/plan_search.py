"""The search for the best execution plans of a job on some GPUs, within the limits of its program.

A plan divides the model (stages, their layers and parallelism), the batch (micro-batches) and the
states (ZeRO, recomputation, offload). All uniform plans are priced at once: stages of equal GPUs and
parallelism. For the most promising micro-batches and switches, the exact search of
:mod:`tessera.estimator.planning.search` then looks for faster plans with stages of any kind. If a
model is small, it does so for all micro-batches and switches. At last, chunks of layers are tried
(interleaving).

States are offloaded to the host only if nothing fits without, or if that is faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import Final

import numpy as np

from tessera.estimator.cells import COARSE_LAYERS, Setting
from tessera.estimator.hardware import GIB
from tessera.estimator.memory import limit_bytes
from tessera.estimator.planning.mixed import MixedStages
from tessera.estimator.planning.uniform import (
    interleaved_divisions,
    possible_counts,
    possible_degrees,
    uniform_divisions,
)
from tessera.estimator.pricing.divisions import Divisions, PlanTable
from tessera.estimator.pricing.price import PlanPrice, price_plan
from tessera.formulation.base.cancellation import never_cancelled, require_caller
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import Capacity
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanSwitches,
    Precision,
    Recomputation,
    ZeroStage,
)
from tessera.formulation.job.techniques import PlanLimits

CORES_PER_GPU: Final = (1, 2, 4, 8)
"""Numbers of CPU cores for each GPU that are tried for offloaded states."""

MIN_GAIN: Final = 0.01
"""Share of the time that a plan must save to be kept next to one that needs less of the hosts."""

EXACT_WORK: Final = 400_000
"""Layers times candidate stages in all micro-batches and switches, up to which the search is exact."""

MAX_MIXED_GPUS: Final = 512
"""Largest number of GPUs for which stages of different kinds are searched. If there are more, each
stage has a multiple of the largest power of two that divides the GPUs, and these units count."""

OPEN: Final = PlanLimits(runtime="command")
"""The limits of jobs whose program may run any plan."""

_CLOSE: Final = 1.2
"""Pipeline degrees are refined whose best uniform plan takes up to this multiple of the best time."""

_FEW_GPUS: Final = 64
"""GPUs up to which odd pipelines are searched in every number of micro-batches."""

_MAX_TRIED: Final = 32
"""Number of interleaved plans whose memory is computed, the fastest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedChoices:
    """Choices that a search keeps. It searches those that are None."""

    micro_batches: int | None = None
    zero: ZeroStage | None = None
    recomputation: Recomputation | None = None

    def allow(self, switches: PlanSwitches) -> bool:
        """Return whether these are the switches to keep."""
        kept_pairs = ((self.zero, switches.zero), (self.recomputation, switches.recomputation))
        return all(choice in (None, value) for choice, value in kept_pairs)


class PlanSearch:
    """A search for plans within limits in one setting.

    ``model`` is the name of the model in plans. ``degrees`` are the pipeline degrees; if it is
    None, all possible ones are. Plans with ``exhausted_digests`` need more memory than the model
    predicts, so all plans are left out that need as much by the model. ``node`` is what a node has.
    If it is None, its CPU cores and host memory are not known. ``choices`` are kept instead of
    searched.
    """

    def __init__(
        self,
        setting: Setting,
        limits: PlanLimits = OPEN,
        model: str = "",
        *,
        degrees: Collection[int] | None = None,
        exhausted_digests: Collection[str] = (),
        node: Capacity | None = None,
        is_cancelled: Callable[[], bool] = never_cancelled,
        choices: FixedChoices | None = None,
    ) -> None:
        """Remember what to search. Searching starts with the first question."""
        self._choices = choices or FixedChoices()
        self._setting, self._limits, self._model = setting, limits, model
        self._exhausted_digests, self._node, self._is_cancelled = (
            exhausted_digests,
            node,
            is_cancelled,
        )
        graph, gpus = setting.graph, setting.shape.gpus
        tried_degrees = possible_degrees(len(graph), gpus) if degrees is None else degrees
        self.degrees = tuple(sorted({d for d in tried_degrees if 1 <= d <= min(gpus, len(graph))}))
        self._limit_bytes = limit_bytes(setting.hardware.memory_bytes, setting.runtime.room)

    def best_by_degree(self) -> dict[int, PlanPrice]:
        """Return the fastest plan of each pipeline degree.

        If no plan of a degree fits in memory, it is the one that needs least of it, or one for which
        the hosts are too small. A degree is absent if it has no plan within the limits.

        Raises:
            DeadlineTooShort: it was cancelled.
        """
        choices = _core_choices(self._setting, self._node)
        best: dict[int, PlanPrice] = {}
        for degree in self.degrees:
            price = self._best([degree], max(choices, default=None)) or self._tightest([degree])
            if price is not None:
                best[degree] = price
        return best

    def host_variants(self) -> list[PlanPrice]:
        """Return the fastest plan, and slower ones that need less of the hosts.

        Each is faster, by :data:`MIN_GAIN`, than all that need no more CPU cores and host memory.
        If nothing fits, it is one plan that does not, if there is any.

        Raises:
            DeadlineTooShort: it was cancelled.
        """
        if self._node is None:
            price = self._best(self.degrees, 0) or self._tightest(self.degrees)
            return [] if price is None else [price]
        price = self._best_on_gpus(self.degrees)
        prices = [] if price is None else [price]
        max_s = math.inf if price is None else (1.0 - MIN_GAIN) * price.iter_time_s
        for cores in reversed(_core_choices(self._setting, self._node)):
            price = self._best_offloaded(self.degrees, cores)
            if price is None or price.iter_time_s >= max_s:
                break  # with fewer cores, it needs as much memory and is slower
            prices.append(price)
        fitting = [price for price in prices if not self.host_shortage(price)]
        if fitting:
            return _unbeaten(fitting)
        price = next(iter(prices), None) or self._tightest(self.degrees)
        return [] if price is None else [price]

    def find_each_kind(self) -> Iterator[PlanPrice]:
        """Yield a plan for each uniform division and switch, with the fewest micro-batches.

        They fit into memory. Offloaded states are among them if a node has cores for them and the
        limits do not leave open whether the program can offload. Without replicas, ZeRO divides
        nothing, and all its stages are one kind.
        """
        choices = _core_choices(self._setting, self._node) if self._node is not None else ()
        tables = [self._table(self._uniform_divisions, self.switches)]
        if not self._limits.allow_every_plan:
            tables += [
                self._table(self._uniform_divisions, self._offload_switches(cores))
                for cores in choices
            ]
        for table in filter(None, tables):
            known_kinds = set[tuple[int, int]]()
            counts = table.divisions.accumulation
            for index in table.in_order(self.degrees, counts, self._limit_bytes):
                if table.kind(index) not in known_kinds:
                    known_kinds.add(table.kind(index))
                    price = self._price(table.plan(index))
                    if (
                        price is not None
                        and _divides_states(price.plan)
                        and not self.host_shortage(price)
                    ):
                        yield price

    def host_shortage(self, price: PlanPrice) -> str:
        """Return what a node lacks for its share of a plan, or "" if it has enough."""
        node = self._node
        share = price.demand.on_node(self._setting.shape.gpus_per_node)
        if node is None or node.host_bytes is None or share.host_bytes <= node.host_bytes:
            return ""
        return (
            f"{price.plan} needs {share.host_bytes / GIB:.1f} GiB of host memory on a node, but a node has"
            f" {node.host_bytes / GIB:.1f} GiB"
        )

    def _best(self, degrees: Collection[int], cores: int | None) -> PlanPrice | None:
        """Return the fastest plan of some degrees, or None. None for ``cores`` keeps all on GPUs.

        Offload is tried if what fits without it recomputes activations, and must save
        :data:`MIN_GAIN`.
        """
        price = self._best_on_gpus(degrees)
        if cores is None or (price and price.plan.recomputation is Recomputation.NONE):
            return price
        offload = self._best_offloaded(degrees, cores)
        if price is None or offload is None:
            return price or offload
        saves = offload.iter_time_s < (1.0 - MIN_GAIN) * price.iter_time_s
        return offload if saves and not self.host_shortage(offload) else price

    def _best_on_gpus(self, degrees: Collection[int]) -> PlanPrice | None:
        """Return the fastest plan of some degrees that keeps all states on the GPUs, or None."""

        def find(max_bytes: float) -> PlanPrice | None:
            best = self._fastest(self._gpu_table, degrees, max_bytes)
            for price in self._mixed_prices:
                if price.plan.pipeline_degree in degrees and max(price.memory_bytes) <= max_bytes:
                    best = _faster(best, price)
            known_s = math.inf if best is None else best.iter_time_s
            return self._fastest(self._interleaved_table, degrees, max_bytes, known_s) or best

        return self._without_exhausted(find)

    def _best_offloaded(self, degrees: Collection[int], cores: int) -> PlanPrice | None:
        """Return the fastest plan of some degrees that offloads states, or None."""
        table = self._make_offloaded_table(cores)
        return self._without_exhausted(lambda max_bytes: self._fastest(table, degrees, max_bytes))

    def _without_exhausted(self, find: Callable[[float], PlanPrice | None]) -> PlanPrice | None:
        """Return the first plan that is not exhausted, with less and less memory."""
        best = find(self._limit_bytes)
        while best is not None and best.plan.digest in self._exhausted_digests:
            best = find(max(best.memory_bytes) - 1.0)
        return best

    def _fastest(
        self,
        table: PlanTable | None,
        degrees: Collection[int],
        max_bytes: float,
        known_s: float = math.inf,
    ) -> PlanPrice | None:
        """Return the fastest plan of a table that is faster than a known one, or None."""
        order = iter(()) if table is None else table.in_order(degrees, table.seconds, max_bytes)
        for index in islice(order, _MAX_TRIED):
            if table is None or table.seconds.flat[index] >= known_s:
                break
            price = self._price(table.plan(index))
            if price is not None and max(price.memory_bytes) <= max_bytes:
                return price
        return None

    def _tightest(self, degrees: Collection[int]) -> PlanPrice | None:
        """Return the plan that needs least memory of a GPU, or None if there is no plan."""
        tightest = None
        for table in filter(None, (self._gpu_table, self._make_offloaded_table(0))):
            index = next(table.in_order(degrees, table.bytes), None)
            price = None if index is None else self._price(table.plan(index))
            if price is not None and price.plan.digest not in self._exhausted_digests:
                min_bytes = math.inf if tightest is None else max(tightest.memory_bytes)
                tightest = price if max(price.memory_bytes) < min_bytes else tightest
        return tightest

    def _price(self, plan: ExecutionPlan) -> PlanPrice | None:
        """Return the price of a plan, or None if the model does not allow its division."""
        try:
            return price_plan(self._setting, plan)
        except InvalidInput:
            return None

    def _table(
        self,
        divisions: Divisions | None,
        switches: Sequence[PlanSwitches],
        known_s: Mapping[int, float] | None = None,
    ) -> PlanTable | None:
        """Return a table of plans, or None without divisions.

        Plans that are exhausted make the memory of others uncertain, so all are priced then.
        """
        require_caller(self._is_cancelled)
        switches = [each for each in switches if self._choices.allow(each)]
        if divisions is None or not len(divisions) or not switches:
            return None
        if self._exhausted_digests or self._choices != FixedChoices():
            known_s = None
        return PlanTable(
            self._setting, divisions, switches, self._limits, self._model, known_s=known_s
        )

    @cached_property
    def _uniform_divisions(self) -> Divisions | None:
        setting = self._setting
        batch = setting.training.global_batch
        return uniform_divisions(
            setting.graph, setting.shape, batch, self.degrees, self._choices.micro_batches
        )

    @cached_property
    def _recomputations(self) -> tuple[Recomputation, ...]:
        """Return the choices of recomputation, the fastest one first."""
        if self._setting.graph.attention_flops.any():
            return (Recomputation.NONE, Recomputation.SELECTIVE, Recomputation.FULL)
        return (Recomputation.NONE, Recomputation.FULL)

    @cached_property
    def switches(self) -> tuple[PlanSwitches, ...]:
        """Return the switches without offload, the simplest and fastest ones first."""
        pairs = product(self._recomputations, ZeroStage)
        return tuple(
            PlanSwitches(zero=zero, recomputation=recomputation) for recomputation, zero in pairs
        )

    @cached_property
    def _gpu_table(self) -> PlanTable | None:
        return self._table(self._uniform_divisions, self.switches, {})

    @cached_property
    def _interleaved_table(self) -> PlanTable | None:
        setting = self._setting
        batch = setting.training.global_batch
        divisions = interleaved_divisions(
            setting.graph, setting.shape, batch, self.degrees, self._choices.micro_batches
        )
        known_s = self._known_s(self.degrees)
        for price in self._mixed_prices:
            known_s[price.plan.pipeline_degree] = price.iter_time_s
        return self._table(divisions, self.switches, known_s)

    @cached_property
    def _offloaded_tables(self) -> dict[int, PlanTable | None]:
        return {}

    def _make_offloaded_table(self, cores: int) -> PlanTable | None:
        """Return the table of plans that offload states, with some CPU cores for each GPU.

        Offload adds time to a division. One that would be slower with all states on the GPUs than
        the best plan of its degree is left out.
        """
        tables = self._offloaded_tables
        if cores not in tables:
            divisions, gpu_table = self._uniform_divisions, self._gpu_table
            if divisions is not None and gpu_table is not None and not self._exhausted_digests:
                known_s = self._known_s(self.degrees)
                max_s = np.array([known_s[degree] for degree in divisions.degrees.tolist()])
                gpu_s = gpu_table.seconds.min(axis=0)
                divisions = divisions.select(~(np.isfinite(gpu_s) & (gpu_s >= max_s)))
            tables[cores] = self._table(divisions, self._offload_switches(cores))
        return tables[cores]

    def _offload_switches(self, cores: int) -> list[PlanSwitches]:
        placements = [(zero, Offload.OPTIMIZER) for zero in ZeroStage if zero]
        placements.append((ZeroStage.PARAMETERS, Offload.PARAMETERS))
        return [
            PlanSwitches(
                zero=zero, recomputation=recomputation, offload=offload, cpus_per_gpu=cores
            )
            for recomputation, (zero, offload) in product(self._recomputations, placements)
        ]

    @cached_property
    def _mixed_prices(self) -> list[PlanPrice]:
        """Return plans with stages of any kind that are faster than all others of their degree."""
        setting, choices = self._setting, self._choices
        degrees = [d for d in self.degrees if 1 < d <= COARSE_LAYERS]
        gpus = setting.shape.gpus
        known_s = self._known_s(degrees)
        unit = gpus & -gpus if gpus > MAX_MIXED_GPUS else 1
        is_planned = unit > 1 and math.isfinite(min(known_s.values(), default=math.inf))
        if not degrees or gpus // unit > MAX_MIXED_GPUS or is_planned:
            return []
        stages = MixedStages(setting, degrees[-1], unit, self._is_cancelled)
        plan_found: dict[int, ExecutionPlan] = {}

        def refine(count: int, switches: PlanSwitches, limits_s: Mapping[int, float]) -> None:
            if choices.allow(switches):
                for seconds, plan in stages.search(count, switches, limits_s, self._model):
                    if self._limits.allow(plan):
                        degree = plan.pipeline_degree
                        plan_found[degree], known_s[degree] = plan, seconds

        uniform_s = dict(known_s)
        for (count, switches), degrees_here in self._find_promising(stages.work, known_s).items():
            refine(count, switches, {degree: known_s[degree] for degree in degrees_here})
        for degree, seconds in uniform_s.items():
            batching = self._best_batching(degree)
            # A degree that is far from the best is refined only if that may make it the best.
            if batching is not None and seconds > _CLOSE * min(uniform_s.values()):
                refine(*batching, {degree: min(known_s.values())})
        prices = map(self._price, plan_found.values())
        return [price for price in prices if price is not None and price.overflow is None]

    @cached_property
    def _best_uniform(self) -> dict[int, int]:
        """Return the index of the best uniform plan that fits, by pipeline degree."""
        table = self._gpu_table
        if table is None:
            return {}
        best = {
            degree: next(table.in_order([degree], table.seconds, self._limit_bytes), None)
            for degree in self.degrees
        }
        return {degree: index for degree, index in best.items() if index is not None}

    def _known_s(self, degrees: Iterable[int]) -> dict[int, float]:
        """Return the time of the best uniform plan of each degree, or infinity."""
        table, best = self._gpu_table, self._best_uniform
        return {
            degree: math.inf
            if table is None or degree not in best
            else float(table.seconds.flat[best[degree]])
            for degree in degrees
        }

    def _best_batching(self, degree: int) -> tuple[int, PlanSwitches] | None:
        """Return the micro-batches and switches of the best uniform plan of a degree, or None."""
        table, index = self._gpu_table, self._best_uniform.get(degree)
        return None if table is None or index is None else table.batching(index)

    def _find_promising(
        self, work: int, known_s: Mapping[int, float]
    ) -> dict[tuple[int, PlanSwitches], list[int]]:
        """Return the micro-batches and switches for stages of different kinds, with their degrees.

        If there is little ``work`` (layers times candidate stages), all are promising. Otherwise,
        the model's own training is, for all degrees. So are the best uniform plans of the degrees
        close to the best one, for these. Degrees without uniform plans have the numbers of
        micro-batches of the others, or all on few GPUs, with the least recomputation and the most.
        """
        training = self._setting.training
        counts = possible_counts(training.global_batch, 1, self._choices.micro_batches)
        pairs = list(product(counts, self.switches))
        if work * len(pairs) <= EXACT_WORK:
            return {key: list(known_s) for key in pairs}
        degrees_by_batching: dict[tuple[int, PlanSwitches], set[int]] = defaultdict(set)
        close = {d for d, s in known_s.items() if s <= _CLOSE * min(known_s.values())}
        for degree in close:
            batching = self._best_batching(degree)
            if batching is not None:
                degrees_by_batching[batching] |= close
        ends = (Recomputation.NONE, Recomputation.FULL)
        divisions = self._uniform_divisions
        odd = known_s.keys() - (set() if divisions is None else set(divisions.degrees.tolist()))
        odd_counts = {count for count, _ in degrees_by_batching}
        if not odd_counts or self._setting.shape.gpus <= _FEW_GPUS:
            odd_counts = set(counts)
        for count, recomputation in product(odd_counts if odd else (), ends):
            switches = PlanSwitches(zero=ZeroStage.OPTIMIZER, recomputation=recomputation)
            degrees_by_batching[count, switches] |= odd
        model_switches = PlanSwitches(
            zero=ZeroStage(self._setting.runtime.states.zero),
            recomputation=training.recomputation,
        )
        if self._choices.micro_batches in (None, training.micro_batches):
            degrees_by_batching[training.micro_batches, model_switches] |= known_s.keys()
        return {batching: sorted(some) for batching, some in degrees_by_batching.items()}


def has_division(setting: Setting, limits: PlanLimits) -> bool:
    """Return whether limits allow some uniform plan in a setting, however much memory it needs."""
    degrees = possible_degrees(len(setting.graph), setting.shape.gpus)
    batch = setting.training.global_batch
    divisions = uniform_divisions(setting.graph, setting.shape, batch, degrees)
    if divisions is None:
        return False
    dtypes = ("bf16", "f16") if setting.graph.dtype == "f16" else (setting.graph.dtype,)
    _, kind_rows = np.unique(divisions.kind, return_index=True)
    return any(
        limits.allow(
            replace(divisions.plan(setting, index, model_switches, ""), precision=Precision(dtype))
        )
        for index in kind_rows.tolist()
        for model_switches in PlanSearch(setting).switches
        for dtype in dtypes
    )


def _core_choices(setting: Setting, node: Capacity | None) -> tuple[int, ...]:
    """Return the numbers of cores for each GPU that a node has for its GPUs of a shape.

    0 leaves the number open, because the node does not state its cores.
    """
    if node is None or node.cpus is None:
        return (0,)
    max_cores = node.cpus // setting.shape.gpus_per_node
    return tuple(cores for cores in CORES_PER_GPU if cores <= max_cores)


def _divides_states(plan: ExecutionPlan) -> bool:
    """Return whether a plan has replicas to divide states among, if it divides them on GPUs."""
    has_replicas = any(stage.dp > 1 for stage in plan.stages)
    return has_replicas or plan.zero is ZeroStage.NONE or plan.offload is not Offload.NONE


def _faster(price: PlanPrice | None, rival: PlanPrice | None) -> PlanPrice | None:
    """Return the faster of two plans, the first one if they are equal."""
    if price is None or rival is None:
        return price or rival
    return rival if rival.iter_time_s < price.iter_time_s else price


def _unbeaten(prices: Iterable[PlanPrice]) -> list[PlanPrice]:
    """Return the prices that are faster than all of those that need no more of the hosts."""
    unbeaten_prices: list[PlanPrice] = []
    for price in sorted(prices, key=lambda p: (p.plan.cpus, p.host_bytes, p.iter_time_s)):
        rivals = (
            rival.iter_time_s for rival in unbeaten_prices if rival.host_bytes <= price.host_bytes
        )
        if price.iter_time_s < (1.0 - MIN_GAIN) * min(rivals, default=math.inf):
            unbeaten_prices.append(price)
    return unbeaten_prices
