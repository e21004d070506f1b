"""The time of a pipeline, event by event."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.formulation.job.execution_plan import Schedule


def simulated_s(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    micro_batches: int,
    send_s: Sequence[float] | None = None,
) -> float:
    """Return the seconds until the last backward pass ends, event by event.

    ``send_s[i]`` is the time from stage i to stage i + 1, and the time back. Transfers never wait for
    one another.
    """
    stages = len(forward_s)
    wires = [0.0] * stages if send_s is None else list(send_s)
    orders = [_order(schedule, stages, i, micro_batches) for i in range(stages)]
    ended: dict[tuple[int, bool, int], float] = {}
    free, turn = [0.0] * stages, [0] * stages
    while any(turn[i] < len(orders[i]) for i in range(stages)):
        for i in range(stages):
            while turn[i] < len(orders[i]):
                back, batch = orders[i][turn[i]]
                ready = _ready_s(ended, wires, stages, (i, back, batch))
                if ready is None:
                    break
                free[i] = max(free[i], ready) + (backward_s[i] if back else forward_s[i])
                ended[i, back, batch] = free[i]
                turn[i] += 1
    return max(free)


def _order(
    schedule: Schedule, stages: int, stage: int, micro_batches: int
) -> list[tuple[bool, int]]:
    """Return the passes of a stage in order, as pairs (whether it is backward, micro-batch)."""
    ahead = micro_batches if schedule is Schedule.GPIPE else min(stages - stage, micro_batches)
    order = [(False, batch) for batch in range(ahead)]
    for batch in range(micro_batches):
        order.append((True, batch))
        if ahead + batch < micro_batches:
            order.append((False, ahead + batch))
    return order


def _ready_s(
    ended: dict[tuple[int, bool, int], float],
    wires: list[float],
    stages: int,
    task: tuple[int, bool, int],
) -> float | None:
    """Return the time at which the input of a pass has arrived.

    If the input has not been computed yet, return None.
    """
    stage, back, batch = task
    if not back and stage == 0:
        return 0.0
    before = (
        (stage, False, batch)
        if back and stage == stages - 1
        else (stage + 1 if back else stage - 1, back, batch)
    )
    if before not in ended:
        return None
    wire = 0.0 if before[0] == stage else wires[min(stage, before[0])]
    return ended[before] + wire
