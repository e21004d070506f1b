"""Jobs on a real cluster, as recorded by Arena's artifact (``arena/testbed_runs.csv``)."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from tessera.formulation.errors import InvalidInput
from tessera.formulation.values import Workload
from tessera.simulator.overheads import Overheads

ROUND_S: Final = 300.0
"""The seconds between the testbed's rounds (Crius, section 7)."""
EARLY_S: Final = 60.0
"""The seconds by which a run's time without training may be negative.

The recorded iteration times are means, so they may exceed the run.
"""
PRUNED_POLICIES: Final = ("crius",)
"""The policies whose plan search was pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSegment:
    """A stretch of a job on the testbed, with times in seconds since the campaign began.

    ``start_s`` is not recorded, see ``start_of``. ``search_s`` and ``iter_time_s`` are 0 if no
    iteration was trained.
    """

    start_s: float
    end_s: float
    gpu_type: str
    nodes: int
    gpus_per_node: int
    iterations: int
    iter_time_s: float
    search_s: float
    last: bool
    """Whether the job was done after this run."""

    @property
    def gpus(self) -> int:
        """Return the number of GPUs held."""
        return self.nodes * self.gpus_per_node

    @property
    def launch_s(self) -> float:
        """Return the time of holding GPUs without search or whole iterations."""
        return self.end_s - self.start_s - self.search_s - self.iterations * self.iter_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """A job of a campaign under a policy, with all of its runs in order."""

    campaign: str
    policy: str
    name: str
    workload: Workload
    origin_s: float
    """The time zero of the job's clock, on the clock of the record."""
    runs: tuple[RunSegment, ...]
    left: int  # iterations left when its last run ended
    consistent: bool
    """Whether the iterations left after each run are those before it less those trained in it."""

    @property
    def iterations(self) -> int:
        """Return the iterations of the whole job."""
        return self.left + sum(run.iterations for run in self.runs)

    @property
    def done(self) -> bool:
        """Return whether it was trained to the end."""
        return bool(self.runs) and self.runs[-1].last


def read_runs(path: Path, submitted_s: Mapping[str, float]) -> list[RecordedJob]:
    """Read the records. ``submitted_s`` is by job, on the record's clock; no job starts before it.

    Rows of an ``error`` repeat the run that they end, which has its own row. Runs after a job was
    done trained nothing. Both are left out.

    Raises:
        InvalidInput: a column is absent, or a cell is not a number.
        OSError: the file is absent.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    try:
        origin_s = _origins(rows)
        by_job: dict[tuple[str, str, str], list[dict[str, str]]] = {}
        for row in rows:
            if row["event"] == "end":
                key = (row["campaign"], row["policy"], row["job"])
                by_job.setdefault(key, []).append(row)
        return [
            _job(key, result, origin_s[key[0]], submitted_s.get(key[2], origin_s[key[0]]))
            for key, result in by_job.items()
        ]
    except (KeyError, ValueError) as error:
        raise InvalidInput(path.name, f"is not a record of testbed runs: {error!r}") from None


def _origins(rows: Sequence[dict[str, str]]) -> dict[str, float]:
    """Return a time origin of each campaign that falls on a round.

    Rounds preempt jobs, so most of the ends of unfinished runs are whole rounds apart. The origin
    is such a time, at least a round before the first end.
    """
    origins = {}
    for campaign in {row["campaign"] for row in rows}:
        of = [row for row in rows if row["campaign"] == campaign]
        phases = [
            float(row["timestamp_s"]) % ROUND_S
            for row in of
            if row["event"] == "end" and int(row["remaining_iterations"]) > 0
        ]
        phase = max(sorted(set(phases)), key=phases.count) if phases else 0.0
        first_s = min(float(row["timestamp_s"]) for row in of)
        origins[campaign] = phase + ROUND_S * (math.floor((first_s - phase) / ROUND_S) - 4)
    return origins


def _job(
    key: tuple[str, str, str], rows: list[dict[str, str]], origin_s: float, submitted_s: float
) -> RecordedJob:
    rows = sorted(rows, key=lambda row: int(row["try"]))
    first = rows[0]
    total = int(first["executed_iterations"]) + int(first["remaining_iterations"])
    runs, left, free_s, consistent = [], total, submitted_s - origin_s, True
    for row in rows:
        done, left_after = int(row["executed_iterations"]), int(row["remaining_iterations"])
        consistent &= left - done == left_after
        end_s = float(row["timestamp_s"]) - origin_s
        iter_time_s, search_s = (float(row[c] or 0) for c in ("iter_time_s", "ap_search_s"))
        runs.append(
            RunSegment(
                start_s=start_of(end_s, done * iter_time_s + search_s, free_s),
                end_s=end_s,
                gpu_type=row["gpu_type"],
                nodes=int(row["num_nodes"]),
                gpus_per_node=int(row["gpus_per_node"]),
                iterations=done,
                iter_time_s=iter_time_s,
                search_s=search_s,
                last=left_after == 0,
            )
        )
        left, free_s = left_after, end_s
        if left == 0:
            break
    workload = Workload(
        model=first["model"], params=first["params"], global_batch=int(first["global_batch"])
    )
    return RecordedJob(
        campaign=key[0],
        policy=key[1],
        name=key[2],
        workload=workload,
        origin_s=origin_s,
        runs=tuple(runs),
        left=left,
        consistent=consistent,
    )


def start_of(end_s: float, busy_s: float, free_s: float) -> float:
    """Return the round at which a run began that ended at ``end_s`` and worked ``busy_s`` seconds.

    Only rounds start jobs, so it is the last round that leaves time for the work, but not one
    before the job was free. ``EARLY_S`` allows the time without search and iterations to be
    slightly below 0.
    """
    latest = math.floor((end_s - busy_s + EARLY_S) / ROUND_S) * ROUND_S
    if busy_s == 0 and latest >= end_s:
        latest -= ROUND_S
    return max(min(latest, math.ceil(end_s / ROUND_S) * ROUND_S - ROUND_S), _round_from(free_s))


def _round_from(at_s: float) -> float:
    return math.ceil(at_s / ROUND_S - 1e-9) * ROUND_S


def fit_overheads(jobs: Sequence[RecordedJob], pruned: bool) -> Overheads:
    """Return the overheads of the runs of ``jobs``: medians, which are by GPU count for searches.

    ``load_s`` is that of first runs. ``save_s`` is the additional time of later runs, at least 0.
    """
    mine = [job for job in jobs if (job.policy in PRUNED_POLICIES) == pruned]
    trained = [(i, run) for job in mine for i, run in enumerate(job.runs) if run.iterations]
    launch_s = {i: [r.launch_s for k, r in trained if (k > 0) == i] for i in (False, True)}
    search_s: dict[int, list[float]] = {}
    for _, run in trained:
        if run.search_s > 0:
            search_s.setdefault(run.gpus, []).append(run.search_s)
    if not launch_s[False] or not search_s:
        raise InvalidInput("testbed_runs", "has too few runs to fit overheads of")
    load_s = max(0.0, median(launch_s[False]))
    again_s = median(launch_s[True]) if launch_s[True] else load_s
    return Overheads(
        load_s=load_s,
        save_s=max(0.0, again_s - load_s),
        search_s={n: median(s) for n, s in sorted(search_s.items())},
    )
