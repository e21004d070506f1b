"""The division of a model's blocks among the parts of an execution plan.

A model here is an embedding, blocks that are alike, and a head. A plan counts all of them as
layers, and other programs count only the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.formulation.job.execution_plan import ExecutionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDivision:
    """The division of blocks among the ranks of a pipeline, as Megatron-LM can be asked for it.

    Each rank has as many blocks as any other, with these exceptions. If ``counts_ends``, the
    embedding and the head count as a block each. ``first`` and ``last`` are the blocks of the first
    and of the last rank, if these differ from the others', and otherwise None.
    """

    counts_ends: bool = False
    first: int | None = None
    last: int | None = None


def block_counts(plan: ExecutionPlan) -> list[int]:
    """Return the blocks of each part of a plan: its layers without the embedding and the head."""
    counts = [stage.end - stage.start for stage in plan.stages]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def divide_blocks(plan: ExecutionPlan) -> BlockDivision | None:
    """Return the division of a plan's blocks, or None if no ``BlockDivision`` describes it."""
    counts, degree = block_counts(plan), plan.pipeline_degree
    if len(set(counts)) == 1:
        return BlockDivision()
    if len({stage.end - stage.start for stage in plan.stages}) == 1:
        return BlockDivision(counts_ends=True)
    by_rank = [set(counts[rank::degree]) for rank in range(degree)]
    if any(len(chunks) > 1 for chunks in by_rank) or len(set.union(set(), *by_rank[1:-1])) > 1:
        return None  # chunks of a rank differ, or ranks between the first and the last one do
    first, last = (sum(counts[rank::degree]) for rank in (0, degree - 1))
    return BlockDivision(first=first, last=last) if first > 0 and last > 0 else None
