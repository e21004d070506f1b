"""A second executor, which replays an allocation log and returns the jobs' completion times.

It shares no code with the simulator. It reads the file that ``docs/internals/simulator.md`` describes.
The costs of starts, the rates of shapes and the losses of failures are implemented again from their
descriptions. A defect in the simulator's accounting therefore shows as a difference.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
TASKS = "tessera.profiling"
"""The model of profiling tasks."""
REPLAY_TOLERANCE = 1e-6
"""The relative tolerance within which two numbers count as equal."""


class ReplayFailed(AssertionError):
    """An error of a log that contradicts itself or the rules."""


@dataclass(slots=True)
class _Job:
    done: float = 0.0
    end_s: float = -math.inf  # of its last segment
    finish_s: float = math.inf
    continued: Row | None = None  # the segment that the next one continues
    base: float = 0.0  # progress when its present run began
    saved: bool = False
    last: tuple[Any, ...] | None = None  # the Cell that it ran on last
    owed: tuple[bool, tuple[Any, ...] | None] = (False, None)  # ``saved`` and ``last`` before it
    trained: list[tuple[float, float, float]] = field(default_factory=list)
    """The parts of its present run, as (from, to, iterations/s)."""


def replay_lines(lines: Iterable[str]) -> dict[str, float]:
    """Return each job's completion time in seconds from its arrival, without profiling tasks.

    A job that did not end has inf. Profiling tasks are replayed like jobs. Each of their starts
    costs ``load_s``, and they lose nothing at a failure.

    Raises:
        ReplayFailed: a GPU is held twice or does not exist, or a time or a loss is not what the rules say.
    """
    rows: defaultdict[str, list[Row]] = defaultdict(list)
    for line in lines:
        row = json.loads(line)
        rows[row["kind"]].append(row)
    table = rows["run"][0]["overheads"]
    size = {node["name"]: (node["type"], node["gpus"]) for node in rows["node"]}
    facts, jobs = {j["name"]: j for j in rows["job"]}, {j["name"]: _Job() for j in rows["job"]}
    largest: defaultdict[str, int] = defaultdict(int)
    for kind, gpus in size.values():
        largest[kind] = max(largest[kind], gpus)
    shapes: defaultdict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for p in rows["profile"]:
        fewest = math.ceil(p["gpus"] / max(1, largest[p["type"]]))
        rate = 1.0 / p["iter_time_s"] if p["iter_time_s"] else 0.0
        shapes[(*p["workload"], *_cell(p))][p["nodes"] or fewest] = rate
    _check_gpus(rows["segment"], size)
    for s in sorted(rows["segment"], key=lambda s: (s["start_s"], s["end_s"])):
        fact = facts[s["job"]]
        fewest = math.ceil(s["gpus"] / max(1, largest[s["type"]]))
        own = (*fact["workload"], *_cell(s))
        alike = [own]
        if own not in shapes and own[-2:] == (0, ""):  # its plan is not recorded: the best one
            alike = [key for key in shapes if key[:-2] == own[:-2]]
        rate = max((_rate(shapes[key], fewest, len(s["on"])) for key in alike), default=0.0)
        rate /= s["slowdown"]
        _run(s, jobs[s["job"]], fact, rate, table)
    return {
        name: job.finish_s - facts[name]["arrival_s"]
        for name, job in jobs.items()
        if not _is_task(facts[name])
    }


def _is_task(fact: Row) -> bool:
    return bool(fact["workload"][0] == TASKS)


def _cell(row: Row) -> tuple[Any, ...]:
    return row["type"], row["gpus"], row["degree"], row["plan"]


def _rate(shapes: dict[int, float], fewest: int, nodes: int) -> float:
    """Return the iterations/s on ``nodes`` nodes.

    A shape that was profiled has its own rate. Any other has the rate on the fewest nodes, times
    0.9 for each doubling of the number of nodes. If that rate was not profiled either, it follows
    from the nearest shape that was.
    """
    runs = {n: rate for n, rate in shapes.items() if rate > 0}
    better, worse = [n for n in runs if n < fewest], [n for n in runs if n > fewest]
    best = shapes.get(fewest, -1.0)
    if best < 0:
        best = (
            runs[max(better)] * 0.9 ** math.log2(fewest / max(better))
            if better
            else (runs[min(worse)] if worse else 0.0)
        )
    return shapes.get(nodes, best * 0.9 ** max(0.0, math.log2(nodes / fewest))) if best else 0.0


def _run(s: Row, job: _Job, fact: Row, rate: float, table: Row) -> None:
    start_s, ready_s, end_s, last = s["start_s"], s["ready_s"], s["end_s"], job.continued
    after_s = max(fact["arrival_s"], job.end_s if job.finish_s == math.inf else math.inf)
    _require(s, "follow the previous one", after_s <= start_s <= end_s)
    if last is not None:
        same = last["on"] == s["on"] and last["end_s"] == start_s and _cell(last) == _cell(s)
        _require(s, "continue unchanged", same and ready_s == max(start_s, last["ready_s"]))
    else:
        cost_s = table["load_s"] + table["save_s"] * job.saved
        cost_s += _search_s(table["search_s"], s["gpus"]) * (job.last != _cell(s))
        cost_s = table["load_s"] if _is_task(fact) else cost_s
        _require(s, "be ready when the overheads say", _near(ready_s - start_s, cost_s))
        job.owed, job.base, job.trained = (job.saved, job.last), job.done, []
        job.last = _cell(s)
    needs_s = (fact["iterations"] - job.done) / rate if rate else math.inf
    trains_s = max(0.0, end_s - ready_s)
    job.trained.append((min(ready_s, end_s), end_s, rate))
    job.done, job.end_s, job.continued = job.done + rate * trains_s, end_s, None
    if s["ended_by"] == "finish":
        _require(s, "end when its work ends", _near(trains_s, needs_s) and not s["lost"])
        job.finish_s = ready_s + needs_s
        return
    _require(s, "do no more than its work", trains_s < needs_s or _near(trains_s, needs_s))
    if s["ended_by"] == "timed out":
        job.finish_s = end_s
    elif s["ended_by"] == "speed":
        job.continued = s
    elif end_s < ready_s:
        job.saved, job.last = job.owed
    elif s["ended_by"] == "failure":
        lost = job.done - job.base - _written(job.trained, table["checkpoint_every_s"])
        lost = 0.0 if _is_task(fact) else lost
        _require(s, "lose what came after its checkpoint", _near(lost, s["lost"]))
        job.done, job.saved = job.done - lost, False
    else:
        job.saved = job.done > job.base


def _written(trained: list[tuple[float, float, float]], every_s: float | None) -> float:
    """Return the iterations of a run that are in its last checkpoint."""
    began_s, end_s = trained[0][0], trained[-1][1]
    for from_s, to_s, _ in trained:  # it trains from the first segment that outlasts the start
        if to_s > from_s:
            began_s = from_s
            break
    until_s = began_s + math.floor((end_s - began_s) / every_s) * every_s if every_s else began_s
    return sum(rate * max(0.0, min(to_s, until_s) - from_s) for from_s, to_s, rate in trained)


def _search_s(table: list[list[float]], gpus: int) -> float:
    """Return the seconds of a plan search, linear in the logarithm of GPUs between two counts."""
    below, above = [r for r in table if r[0] <= gpus], [r for r in table if r[0] >= gpus]
    (n, s), (m, t) = below[-1] if below else table[0], above[0] if above else table[-1]
    return s if m <= n else s + (t - s) * math.log2(gpus / n) / math.log2(m / n)


def _check_gpus(segments: list[Row], size: dict[str, tuple[str, int]]) -> None:
    """Check that every GPU exists, fits the Cell, and is held by one segment at a time."""
    until_s: dict[tuple[str, int], float] = {}
    for s in sorted(segments, key=lambda s: (s["start_s"], s["end_s"])):
        held = [(node, gpu) for node, gpus in s["on"] for gpu in gpus]
        there = all(size[n][0] == s["type"] and 0 <= gpu < size[n][1] for n, gpu in held)
        _require(
            s, "hold GPUs that its nodes have", there and len(set(held)) == len(held) == s["gpus"]
        )
        free = all(until_s.get(gpu, -math.inf) <= s["start_s"] for gpu in held)
        _require(s, "hold its GPUs alone", free)
        until_s.update({gpu: s["end_s"] for gpu in held})


def _near(a: float, b: float) -> bool:
    # The tolerance is at least 10 us.
    return abs(a - b) <= REPLAY_TOLERANCE * max(10.0, abs(a), abs(b))


def _require(s: Row, rule: str, holds: bool) -> None:
    if not holds:
        raise ReplayFailed(f"the segment of {s['job']} from {s['start_s']} s on must {rule}")
