"""The runs of an ablation: each takes one thing away, and is compared with another run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tessera.benchmarks.schedulers.knowledge import DATA_PARALLEL, PLANNED, UNPROFILED
from tessera.benchmarks.schedulers.variants import Variant, WorkloadChanges
from tessera.formulation.errors import InvalidInput
from tessera.simulator.comparison.estimate_rows import EstimateRow
from tessera.simulator.comparison.policies import GREEDY, ILP
from tessera.simulator.comparison.runs import RunRequest

ARENA: Final = "arena"
FULL_NAME: Final = "full"
NEEDS_KNOWLEDGE: Final = frozenset({"components", "alone"})
"""The parts in which rounds see the estimator's estimates. In the others they see the true ones."""
ESTIMATE_ERROR: Final = 0.2
"""The mean relative error of the variant with wrong estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """A run to make for each seed, and the run of its part and ``x`` to compare it with."""

    part: str
    policy: str
    variant: str
    against: str  # "policy, variant"
    x: float = 0.0
    run: Variant = field(compare=False)

    @property
    def name(self) -> str:
        """Return the name that identifies the row among those of its part and ``x``."""
        return f"{self.policy}, {self.variant}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationPlan:
    """The parameters of an ablation, from which its runs follow."""

    base: RunRequest
    ours: str
    others: tuple[str, ...]
    heavy: float
    depths: tuple[int, ...]
    queues: tuple[int, ...]
    types: tuple[int, ...]
    rows_of: Mapping[str, tuple[EstimateRow, ...]] = field(default_factory=dict)
    """The estimates that rounds see, by ``tessera.benchmarks.schedulers.knowledge.KNOWLEDGE``. Parts
    without any need none."""

    def rows(self, parts: Collection[str]) -> list[AblationRow]:
        """Return the runs of these parts."""
        return [row for row in self._all(parts) if row.part in parts]

    def _all(self, parts: Collection[str]) -> Iterator[AblationRow]:
        if NEEDS_KNOWLEDGE & set(parts):
            yield from self._with_knowledge()
        yield from self._with_truth()

    def _with_knowledge(self) -> Iterator[AblationRow]:
        yield from self._components()
        blind = self._told(DATA_PARALLEL, "testbed-full-profiled")
        for policy in dict.fromkeys((*self.others, ARENA, self.ours)):
            yield self._row("alone", policy, "", f"{ARENA}, ", Variant(asked=blind))

    def _with_truth(self) -> Iterator[AblationRow]:
        dense = WorkloadChanges(arrival_factor=self.heavy)
        for depth in self.depths:
            deep = replace(self.base, policy=f"{ARENA}@depth={depth}")
            yield AblationRow(
                part="depth",
                policy=ARENA,
                variant="all",
                against=f"{ARENA}, all",
                x=depth,
                run=Variant(asked=deep, shape=dense),
            )
        ordered = with_options(self.ours, "queue_order=true", "opportunistic=true")
        for count in self.queues:
            for policy in (ARENA, ordered):
                run = Variant(asked=self.base, shape=replace(dense, queues=count))
                yield self._row("queues", policy, "", f"{policy}, ", run, count)
        for count in self.types:
            for policy in dict.fromkeys((*self.others, ARENA, self.ours)):
                run = Variant(asked=self.base, shape=WorkloadChanges(gpu_types=count))
                yield self._row("types", policy, "", f"{ARENA}, ", run, count)

    def _components(self) -> Iterator[AblationRow]:
        full = self._told(PLANNED, "testbed-pruned-profiled")
        alike = {
            FULL_NAME: Variant(asked=full),
            "no pruning": Variant(asked=replace(full, overheads="testbed-full-profiled")),
            "no planner": Variant(asked=self._told(DATA_PARALLEL, full.overheads)),
            "no profiler": Variant(asked=self._told(UNPROFILED, "testbed-pruned")),
            "estimates off": Variant(asked=replace(full, error=ESTIMATE_ERROR)),
        }
        own = {
            "no elasticity": Variant(asked=full, shape=WorkloadChanges(at_requested=True)),
            "no heterogeneity": Variant(asked=full, shape=WorkloadChanges(pinned=True)),
        }
        for variant, run in alike.items():
            for policy in (ARENA, self.ours):
                yield self._row("components", policy, variant, f"{policy}, {FULL_NAME}", run)
        for variant in ("no elasticity", "no heterogeneity", "no opportunism"):
            switched = Variant(asked=replace(full, policy=f"{ARENA}-{variant.replace(' ', '-')}"))
            yield AblationRow(
                part="components",
                policy=ARENA,
                variant=variant,
                against=f"{ARENA}, {FULL_NAME}",
                run=switched,
            )
        for variant, run in own.items():
            yield self._row("components", self.ours, variant, f"{self.ours}, {FULL_NAME}", run)
        ordered = Variant(asked=replace(full, policy=with_options(self.ours, "queue_order=true")))
        yield AblationRow(
            part="components",
            policy=self.ours,
            variant="in order",
            against=f"{self.ours}, {FULL_NAME}",
            run=ordered,
        )

    def _told(self, knowledge: str, overheads: str) -> RunRequest:
        return replace(self.base, estimates=self.rows_of[knowledge], overheads=overheads)

    def _row(
        self, part: str, policy: str, variant: str, against: str, run: Variant, x: float = 0.0
    ) -> AblationRow:
        asked = replace(run.asked, policy=policy)
        return AblationRow(
            part=part,
            policy=policy,
            variant=variant or "all",
            x=x,
            against=against if variant else f"{against}all",
            run=replace(run, asked=asked),
        )


def with_options(policy: str, *options: str) -> str:
    """Return one of our policies with more options of a round. Raises InvalidInput."""
    if not policy.startswith((ILP, GREEDY)):
        raise InvalidInput("ours", f"{policy!r} is not ours; write ilp:OBJECTIVE, e.g. ilp:jct")
    return "@".join((policy, *options))
