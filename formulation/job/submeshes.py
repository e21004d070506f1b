"""The way in which Alpa divides the GPUs of equal nodes among pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence


def slice_nodes(
    stage_gpus: Sequence[int], nodes: int, node_gpus: int
) -> tuple[tuple[int, int], ...] | None:
    """Return the number of nodes and of GPUs on each that every stage gets, or None.

    A stage gets whole nodes or a part of one. Alpa fills the nodes with the largest stages first,
    and leaves no GPU (``get_sliced_virtual_submeshes`` of Alpa 0.2.3). Sizes that are powers of two
    always fit nodes whose size is one.
    """
    if sum(stage_gpus) != nodes * node_gpus:
        return None
    shapes = []
    for gpus in stage_gpus:
        if gpus % node_gpus and gpus > node_gpus:
            return None
        shapes.append((1, gpus) if gpus < node_gpus else (gpus // node_gpus, node_gpus))
    used_gpus = 0
    for gpus in sorted((gpus for gpus in stage_gpus if gpus < node_gpus), reverse=True):
        if used_gpus + gpus > node_gpus:
            return None
        used_gpus = (used_gpus + gpus) % node_gpus
    return tuple(shapes)


def refuse_nodes(stage_gpus: Sequence[int], shape: Sequence[int]) -> str:
    """Return why stages do not fit nodes with these numbers of GPUs, or "".

    It is the end of a sentence that begins with the plan.
    """
    if len(set(shape)) > 1:
        return "is for nodes with different numbers of GPUs, and Alpa needs equal ones"
    if slice_nodes(stage_gpus, len(shape), shape[0]) is None:
        return (
            f"has stages of {', '.join(map(str, stage_gpus))} GPUs on {len(shape)} nodes of {shape[0]},"
            " and Alpa gives a stage whole nodes or a part of one, the largest stage first"
        )
    return ""
