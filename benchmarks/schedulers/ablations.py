"""The runs of an ablation: each takes one thing away, and is compared with another run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tessera.benchmarks.schedulers.variants import Variant, WorkloadChanges
from tessera.formulation.errors import InvalidInput
from tessera.simulator.comparison.policies import GREEDY, ILP
from tessera.simulator.comparison.runs import RunRequest

ARENA: Final = "arena"
FULL_NAME: Final = "full"
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
    dp_memory: str  # "": the file is absent
    measured: bool  # whether profiles are measured

    def rows(self) -> list[AblationRow]:
        """Return the runs of all parts that can be made here."""
        return [row for row in self._all() if self._possible(row.run.asked)]

    def left_out(self, parts: Sequence[str]) -> int:
        """Return the number of runs of these parts that cannot be made here."""
        return sum(row.part in parts and not self._possible(row.run.asked) for row in self._all())

    def _possible(self, asked: RunRequest) -> bool:
        if asked.information == "data-parallel":
            return self.measured and bool(self.dp_memory)
        return asked.information == "estimates" or self.measured

    def _all(self) -> Iterator[AblationRow]:
        yield from self._components()
        blind = replace(self._told("data-parallel"), overheads="full-search")
        for policy in dict.fromkeys((*self.others, ARENA, self.ours)):
            yield self._row("alone", policy, "", f"{ARENA}, ", Variant(asked=blind))
        dense = WorkloadChanges(arrival_factor=self.heavy)
        for depth in self.depths:
            run = Variant(asked=self.base, shape=dense, depth=depth)
            yield self._row("depth", ARENA, "", f"{ARENA}, ", run, depth)
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
        alike = {
            FULL_NAME: Variant(asked=self.base),
            "no pruning": Variant(asked=replace(self.base, overheads="full-search")),
            "no planner": Variant(asked=self._told("data-parallel")),
            "no profiler": Variant(asked=self._told("single-gpu")),
            "estimates off": Variant(asked=replace(self.base, error=ESTIMATE_ERROR)),
        }
        own = {
            "no elasticity": Variant(asked=self.base, shape=WorkloadChanges(at_requested=True)),
            "no heterogeneity": Variant(asked=self.base, shape=WorkloadChanges(pinned=True)),
        }
        for variant, run in alike.items():
            for policy in (ARENA, self.ours):
                yield self._row("components", policy, variant, f"{policy}, {FULL_NAME}", run)
        for variant in ("no elasticity", "no heterogeneity", "no opportunism"):
            switched = Variant(
                asked=replace(self.base, policy=f"{ARENA}-{variant.replace(' ', '-')}")
            )
            yield AblationRow(
                part="components",
                policy=ARENA,
                variant=variant,
                against=f"{ARENA}, {FULL_NAME}",
                run=switched,
            )
        for variant, run in own.items():
            yield self._row("components", self.ours, variant, f"{self.ours}, {FULL_NAME}", run)
        ordered = Variant(
            asked=replace(self.base, policy=with_options(self.ours, "queue_order=true"))
        )
        yield AblationRow(
            part="components",
            policy=self.ours,
            variant="in order",
            against=f"{self.ours}, {FULL_NAME}",
            run=ordered,
        )

    def _told(self, information: str) -> RunRequest:
        needs = self.dp_memory if information == "data-parallel" else ""
        return replace(self.base, information=information, dp_memory=needs)

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
