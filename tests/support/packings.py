"""All placed answers of tiny rounds, by brute force, as the checker would accept them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations_with_replacement

from tessera.formulation.answer.placement import Gang
from tessera.formulation.round.problem import Problem, migration_price, placed_value
from tessera.formulation.state.snapshot import Snapshot


def accepted_shapes(gpus: int, nodes: int, sizes: set[int]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of shares on ``nodes`` nodes that the checker accepts."""
    for shape in combinations_with_replacement(range(1, gpus + 1), nodes):
        if sum(shape) != gpus or max(shape) > max(sizes):
            continue
        partial = sum(share not in sizes for share in shape)
        differs = gpus % nodes != 0 and max(Counter(shape).values()) == nodes - 1
        if len(set(shape)) == 1 or partial <= 1 or differs:
            yield shape


def most_on_node(size: int, weight: tuple[int, ...]) -> int:
    """Return the most that shares on a node of ``size`` GPUs weigh, over all sets of shares."""
    return max(
        sum(weight[share] for share in shares)
        for count in range(size + 1)
        for shares in combinations_with_replacement(range(1, size + 1), count)
        if sum(shares) <= size
    )


def best_placed_value(snapshot: Snapshot, problem: Problem, now: Mapping[int, Gang]) -> float:
    """Return the value of the best placed answer, in the problem's integers.

    Coupling rows other than those of GPUs are ignored.
    """
    free = {
        node: int(size)
        for node, size in enumerate(snapshot.nodes.gpus.tolist())
        if snapshot.nodes.schedulable[node]
    }
    known: dict[tuple[int, tuple[int, ...]], float] = {}

    def best(job: int, free: dict[int, int]) -> float:
        if job == len(problem.jobs):
            return 0.0
        key = job, tuple(free.values())
        if key not in known:
            most = -1e18 if problem.must_run[job] else best(job + 1, free)
            seats: dict[tuple[int, ...], float] = {}
            for worth, seat in _seats(snapshot, problem, now, job, free):
                left = tuple(gpus - seat.get(node, 0) for node, gpus in free.items())
                seats[left] = max(worth, seats.get(left, -1e18))
            for left, worth in seats.items():
                most = max(most, worth + best(job + 1, dict(zip(free, left, strict=True))))
            known[key] = most
        return known[key]

    return best(0, free)


def _seats(
    snapshot: Snapshot, problem: Problem, now: Mapping[int, Gang], job: int, free: dict[int, int]
) -> Iterator[tuple[float, dict[int, int]]]:
    """Yield what each way to seat a job is worth, and its GPUs by node."""
    cells = problem.cells
    for column in problem.columns_of(job):
        cell = int(problem.cell[column])
        kind, gpus = int(cells.gpu_type[cell]), int(cells.gpus[cell])
        nodes = [n for n in free if snapshot.nodes.gpu_type[n] == kind]
        sizes = {int(snapshot.nodes.gpus[n]) for n in nodes}
        stays = int(problem.current[job]) == column and job in now
        if stays:
            seat = {node: len(own) for node, own in now[job].members}
            if all(free.get(node, 0) >= own for node, own in seat.items()):
                yield _worth(problem, column, len(seat)), seat
            if not problem.movable[job]:
                continue
        for count in range(1, min(gpus, len(nodes)) + 1):
            worth = _worth(problem, column, count)
            if stays:
                narrow = count == int(cells.nodes[cell])
                worth -= migration_price(problem, job, column, 0 if narrow else count)
            for shape in accepted_shapes(gpus, count, sizes):
                for seat in _assignments(shape, nodes, free):
                    yield worth, seat


def _worth(problem: Problem, column: int, nodes: int) -> float:
    if int(problem.cells.nodes[problem.cell[column]]) == nodes:
        return float(problem.value[column])
    return placed_value(problem, column, nodes)


def _assignments(
    shape: tuple[int, ...], nodes: list[int], free: dict[int, int]
) -> Iterator[dict[int, int]]:
    if not shape:
        yield {}
        return
    for node in nodes:
        if free[node] >= shape[-1]:
            rest = [n for n in nodes if n != node]
            for seat in _assignments(shape[:-1], rest, free):
                yield {node: shape[-1], **seat}
