"""The execution plan that a stated plan means for a model, GPUs and a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from tessera.estimator.graph import Graph
from tessera.estimator.plans import Shape, Training
from tessera.estimator.pricing.price import check_degrees
from tessera.estimator.stated.statement import StatedPlan
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    InvalidPlan,
    PlanStage,
    PlanSwitches,
    Precision,
    Schedule,
    ZeroStage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """A model with its training on GPUs, for which a plan is stated.

    What nobody states is as in ``training`` and ``zero``. ``model`` is ``model/params``, or "".
    """

    graph: Graph
    training: Training
    shape: Shape
    zero: ZeroStage = ZeroStage.NONE
    model: str = ""

    @property
    def blocks(self) -> int:
        """Return the layers between the first one (embedding) and the last one (head)."""
        return max(len(self.graph) - 2, 0)


def complete_plan(stated: StatedPlan, context: PlanContext) -> ExecutionPlan:
    """Return the plan that a statement means.

    Degrees that were not stated are 1, except for data parallelism, which has the remaining GPUs.
    The blocks are divided as the source of the statement divides them. The embedding is in the
    first stage, and the head in the last one.

    Raises:
        InvalidInput: what is stated contradicts itself, the model, the GPUs or the batch; names the
            source's own field.
    """
    _check_model(stated, context)
    degrees = _degrees_of(stated, context)
    pp = stated.value("pp", 1)
    chunks = _chunks_of(stated, context, pp)
    schedule = _schedule_of(stated, pp, chunks)
    micro_batch, count = _batches_of(stated, context, degrees["dp"])
    ends = _stage_ends(stated, context, pp, chunks)
    usual = PlanSwitches(zero=context.zero, recomputation=context.training.recomputation)
    with _own_names(stated):
        whole = PlanStage(start=0, end=len(context.graph), **degrees)
        stages = tuple(replace(whole, start=a, end=b) for a, b in pairwise((0, *ends)))
        check_degrees(context.graph, whole)
        return ExecutionPlan(
            stages=stages,
            micro_batch=micro_batch * whole.dp,
            accumulation=count,
            schedule=schedule,
            chunks=chunks,
            precision=stated.value("precision", Precision(context.graph.dtype)),
            shape=context.shape.each_node,
            model=context.model,
            **{name: stated.value(name, value) for name, value in usual.switch_values().items()},
        )


@contextmanager
def _own_names(stated: StatedPlan) -> Iterator[None]:
    """Rename the fields in errors to those of the statement."""
    try:
        yield
    except (InvalidInput, InvalidPlan) as wrong:
        raise InvalidInput(stated.name(wrong.field), wrong.problem) from wrong


def _degrees_of(stated: StatedPlan, context: PlanContext) -> dict[str, Any]:
    """Return the degrees of each stage. Times the stages, they are the number of GPUs."""
    gpus = context.shape.gpus
    if stated.gpus is not None and stated.gpus != gpus:
        raise InvalidInput(
            stated.name("gpus"), f"states {stated.gpus} GPUs, but the plan is priced on {gpus}"
        )
    tp, pp, cp = (stated.value(name, 1) for name in ("tp", "pp", "cp"))
    of_model = tp * pp * cp
    product = " x ".join(
        f"{stated.name(name)} {value}"
        for name, value in (("tp", tp), ("pp", pp), ("cp", cp))
        if value > 1
    )
    if gpus % of_model:
        largest = max(("tp", "pp", "cp"), key=lambda name: stated.value(name, 1))
        raise InvalidInput(
            stated.name(largest),
            f"does not fit {gpus} GPUs: {product} is {of_model}, which must divide them; change a degree"
            " or the number of GPUs",
        )
    dp = gpus // of_model
    if stated.dp is not None and stated.dp != dp:
        times = f" x {product}" if product else ""
        raise InvalidInput(
            stated.name("dp"),
            f"is {stated.dp}, so the plan has {stated.dp * of_model} GPUs"
            f" ({stated.name('dp')} {stated.dp}{times}), but there are {gpus}; make them equal",
        )
    sp = stated.value("sp", default=False)
    if stated.sp and tp == 1:
        raise InvalidInput(stated.name("sp"), f"needs {stated.name('tp')} of at least 2")
    ep = stated.value("ep", 1) * stated.value("expert_tp", 1)
    return {"dp": dp, "tp": tp, "cp": cp, "ep": ep, "sp": sp and tp > 1}


def _check_model(stated: StatedPlan, context: PlanContext) -> None:
    """Refuse a statement about another model."""
    graph = context.graph
    experts = int(graph.experts.max())
    heads = int(graph.heads.max())
    facts = {
        "blocks": context.blocks,
        "experts": experts if experts > 1 else None,
    }
    for name, ours in facts.items():
        theirs = getattr(stated, name)
        if theirs is not None and ours is not None and theirs != ours:
            raise InvalidInput(
                stated.name(name),
                f"is {theirs}, but the model {graph.name} has {ours} {name}; state the plan of this model",
            )
    if stated.heads is not None and heads and stated.heads % heads:
        raise InvalidInput(
            stated.name("heads"),
            f"is {stated.heads}, but the model {graph.name} has {heads} heads of keys and values; state"
            " the plan of this model",
        )


def _chunks_of(stated: StatedPlan, context: PlanContext, pp: int) -> int:
    """Return the chunks of each stage."""
    chunks: int = stated.value("chunks", 1)
    if stated.blocks_per_chunk is not None and pp > 1:
        each = stated.blocks_per_chunk
        weights = stated.value("embedding_blocks", 0) + stated.value("head_blocks", 0)
        name = stated.name("blocks_per_chunk")
        virtual, rest = divmod(context.blocks + weights, each)
        if rest:
            raise InvalidInput(
                name, f"is {each}, but must divide the model's {context.blocks} blocks"
            )
        if virtual % pp:
            raise InvalidInput(
                name,
                f"is {each}, which gives {virtual} parts of {context.blocks} blocks; they must be a"
                f" multiple of {stated.name('pp')} ({pp})",
            )
        chunks = virtual // pp
    if chunks > 1 and pp == 1:
        raise InvalidInput(
            stated.name("chunks"), f"is {chunks}, but chunks need {stated.name('pp')} of at least 2"
        )
    return chunks


def _schedule_of(stated: StatedPlan, pp: int, chunks: int) -> Schedule:
    schedule = stated.schedule
    if schedule is None:
        return Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B
    if (schedule is Schedule.INTERLEAVED) != (chunks > 1):
        raise InvalidInput(
            stated.name("schedule"),
            f"is {schedule}, but there {'are' if chunks > 1 else 'is'} {chunks} chunk"
            f"{'s' * (chunks > 1)} of layers on each stage's GPUs; an interleaved schedule needs at"
            " least 2, and others 1",
        )
    return schedule


def _batches_of(stated: StatedPlan, context: PlanContext, dp: int) -> tuple[int, int]:
    """Return the samples of a replica's micro-batch, and the number of micro-batches."""
    batch = context.training.global_batch
    if stated.global_batch is not None and stated.global_batch != batch:
        raise InvalidInput(
            stated.name("global_batch"),
            f"is {stated.global_batch}, but the batch to be priced is {batch}; make them equal",
        )
    micro, count = stated.micro_batch, stated.accumulation
    if micro is None:
        count = count or min(context.training.micro_batches, batch)
        if batch % (count * dp):
            raise InvalidInput(
                stated.name("micro_batch"),
                f"is not stated, and {count} micro-batches on {dp} replicas do not divide a batch of"
                f" {batch}; state the samples of a micro-batch in each replica",
            )
        return batch // (count * dp), count
    if count is None:
        if batch % (micro * dp):
            raise InvalidInput(
                stated.name("micro_batch"),
                f"is {micro} in each of {dp} replicas, so the batch must be a multiple of {micro * dp},"
                f" but is {batch}; change one of them",
            )
        return micro, batch // (micro * dp)
    if micro * count * dp != batch:
        raise InvalidInput(
            stated.name("accumulation"),
            f"is {count}: {count} micro-batches of {micro} samples on {dp} replicas are"
            f" {micro * count * dp} samples, but the batch is {batch}; make them equal",
        )
    return micro, count


def _stage_ends(stated: StatedPlan, context: PlanContext, pp: int, chunks: int) -> list[int]:
    """Return the ends of all parts of the model, in its own layers."""
    parts = pp * chunks
    if parts == 1:
        return [len(context.graph)]
    counts = _block_counts(stated, context.blocks, pp, chunks)
    if min(counts) < 0 or min(counts[1:-1], default=1) < 1:
        raise InvalidInput(
            stated.name("pp"),
            f"has too many stages: {context.blocks} blocks are divided into {parts} parts; use fewer",
        )
    ends = list(accumulate(counts))
    return [end + 1 for end in ends[:-1]] + [len(context.graph)]


def _block_counts(stated: StatedPlan, blocks: int, pp: int, chunks: int) -> Sequence[int]:
    """Return the blocks of each part, in the order of the model."""
    embedding, head = stated.value("embedding_blocks", 0), stated.value("head_blocks", 0)
    first, last = stated.first_blocks, stated.last_blocks
    if first is None and last is None:
        counts = _even_counts(stated, blocks + embedding + head, pp * chunks)
        counts[0] -= embedding
        counts[-1] -= head
        return counts
    edges = [(0, first, "first_blocks"), (pp - 1, last, "last_blocks")]
    stated_edges = {rank: (count, name) for rank, count, name in edges if count is not None}
    between = pp - len(stated_edges)
    rest = blocks - sum(count for count, _ in stated_edges.values())
    name = next(iter(stated_edges.values()))[1]
    if rest < 0 or (between == 0 and rest) or (between and rest % (between * chunks)):
        raise InvalidInput(
            stated.name(name),
            f"leaves {rest} of {blocks} blocks for {between} other stages"
            f"{f' of {chunks} chunks' if chunks > 1 else ''}, which must have as many each; change it",
        )
    each = rest // (between * chunks) if between else 0
    by_rank = []
    for rank in range(pp):
        count, field = stated_edges.get(rank, (each * chunks, ""))
        if count % chunks:
            raise InvalidInput(
                stated.name(field), f"is {count}, but must be a multiple of the {chunks} chunks"
            )
        by_rank.append(count // chunks)
    return by_rank * chunks


def _even_counts(stated: StatedPlan, blocks: int, parts: int) -> list[int]:
    each, rest = divmod(blocks, parts)
    if rest and stated.equal_parts:
        raise InvalidInput(
            stated.name("pp"),
            f"divides {blocks} blocks into {parts} parts, which must be equal; use a divisor of {blocks},"
            " or state the blocks of the first or last stage",
        )
    return [each + (part < rest) for part in range(parts)]
