"""The use of GPUs by jobs: exact sums that retention does not change, and their decay."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from tessera.db.clusters.tenants import upsert_tenants
from tessera.db.clusters.usage import sum_usage
from tessera.db.schema.engine import Database
from tessera.db.store.reads import list_jobs
from tessera.db.store.store import Store
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.records.store import Retention
from tessera.formulation.records.usage import UsageQuery, UsageRecord
from tessera.formulation.state.decayed_use import HOST_CODES
from tessera.formulation.state.snapshot import Snapshot
from tessera.v1 import tenants_pb2
from tests.support.api import C as PLACE
from tests.support.api import a_submit, a_tenant, api, refusal_of, some_tenants
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    apply_event,
    commit,
    execute,
    job,
    start,
    submit,
)

DAY_S = 86_400.0


BEGIN = datetime(2026, 1, 10, 7, 30, tzinfo=UTC)


"""The time of the first stint. All of them end weeks before any clock of a test machine."""


Group = tuple[str, ...]


@dataclass
class Stint:
    """A stint as the test knows it, with what its job is."""

    job: str
    tenant: str
    team: str
    gpu_type: str
    gpus: int
    cpus: int
    worth: float
    began: datetime
    trained: datetime | None
    ended: datetime
    ending: str


@dataclass
class History:
    """Random stints of random jobs, and the times at which the jobs ended."""

    stints: list[Stint] = field(default_factory=list)
    ended: dict[str, datetime] = field(default_factory=dict)


def random_history(seed: int, jobs: int = 12) -> History:
    random, history = np.random.default_rng(seed), History()
    for i in range(jobs):
        at = BEGIN + timedelta(microseconds=int(random.integers(0, 4 * 86_400 * 10**6)))
        tenant, team = f"t{i % 3}", f"team{i % 2}"
        for _ in range(random.integers(1, 5)):
            end = at + timedelta(microseconds=int(random.integers(1, 2 * 86_400 * 10**6)))
            trained = at + (end - at) * float(random.uniform(0, 1))
            history.stints.append(
                Stint(
                    job=f"j{i}",
                    tenant=tenant,
                    team=team,
                    gpu_type=str(random.choice(["a100", "v100", "retired"])),
                    gpus=int(random.integers(1, 65)),
                    cpus=int(random.integers(0, 100)),
                    worth=float(random.uniform(0.1, 64)),
                    began=at,
                    trained=trained if random.random() < 0.8 else None,
                    ended=end,
                    ending=str(random.choice(["suspend", "move", "crash", "finish"])),
                )
            )
            at = end  # stints adjoin, as after a move
        history.ended[f"j{i}"] = at
    return history


def store_history(store: Store, database: Database, history: History) -> None:
    a_cluster(store)
    of_job = {stint.job: stint for stint in history.stints}
    for name, stint in of_job.items():
        submit(store, a_spec(name, tenant=stint.tenant, labels={"team": stint.team, "x": name}))
        apply_event(store, name, JobEvent.CANCEL)
        ended = history.ended[name].isoformat()
        execute(
            database,
            f"UPDATE jobs SET ended_at = '{ended}', created_at = '{BEGIN.isoformat()}' WHERE name = '{name}'",
        )
    rows = [
        {
            "job": s.job,
            "gpu_type": s.gpu_type,
            "gpus": s.gpus,
            "cpus": s.cpus,
            "effective_gpus": s.worth,
            "began_at": s.began.isoformat(),
            "trained_at": None if s.trained is None else s.trained.isoformat(),
            "ended_at": s.ended.isoformat(),
            "ending": s.ending,
        }
        for s in history.stints
    ]
    columns = (
        "gpu_type text, gpus bigint, cpus bigint, effective_gpus float8, began_at timestamptz,"
        " trained_at timestamptz, ended_at timestamptz, ending text"
    )
    names = [column.split()[0] for column in columns.split(", ")]
    execute(
        database,
        f"INSERT INTO stints (job_id, {', '.join(names)})"
        f" SELECT j.id, {', '.join('r.' + name for name in names)}"
        f" FROM json_to_recordset('{json.dumps(rows)}') AS r(job text, {columns})"
        " JOIN jobs j ON j.name = r.job ORDER BY r.began_at",
    )


def days_between(first: datetime, last: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Yield the parts of [first, last) by day of UTC."""
    while first < last:
        night = datetime(first.year, first.month, first.day, tzinfo=UTC) + timedelta(days=1)
        yield first, min(night, last)
        first = night


def replay(
    history: History, group_of: Callable[[Stint, datetime], Group], start: datetime, end: datetime
) -> dict[Group, Counter[str]]:
    """Return the sums of each group in microseconds, second by second of the history."""
    sums: dict[Group, Counter[str]] = {}
    for s in history.stints:
        for low, high in days_between(max(s.began, start), min(s.ended, end)):
            us = (high - low) // timedelta(microseconds=1)
            lost = (min(high, s.trained or high) - low) // timedelta(microseconds=1)
            found = sums.setdefault(group_of(s, low), Counter[str]())
            found["gpu"] += s.gpus * us
            found["cpu"] += s.cpus * us
            found["lost"] += s.gpus * max(lost, 0)
            found["worth"] += round(s.worth * us)
        if s.ending == "suspend" and start <= s.ended < end:
            sums.setdefault(group_of(s, s.ended), Counter())["preemptions"] += 1
    return sums


def record_sums(records: tuple[UsageRecord, ...]) -> dict[Group, dict[str, float]]:
    return {
        tuple(record.group.values()): dict(
            gpu=round(record.gpu_s * 1e6),
            cpu=round(record.cpu_s * 1e6),
            lost=round(record.lost_gpu_s * 1e6),
            worth=record.effective_gpu_s * 1e6,
            preemptions=record.preemptions,
        )
        for record in records
    }


def require_equal(found: dict[Group, dict[str, float]], wanted: dict[Group, Counter[str]]) -> None:
    found = {key: sums for key, sums in found.items() if any(sums.values())}
    assert found.keys() == {key for key, sums in wanted.items() if any(sums.values())}
    for key, sums in found.items():
        for name in ("gpu", "cpu", "lost", "preemptions"):
            assert sums[name] == wanted[key][name], (key, name)
        assert sums["worth"] == pytest.approx(wanted[key]["worth"], rel=1e-9)


GROUPINGS: list[tuple[tuple[str, ...], Callable[[Stint, datetime], Group]]] = [
    ((), lambda s, at: ()),
    (("tenant",), lambda s, at: (s.tenant,)),
    (("tenant", "type", "day"), lambda s, at: (s.tenant, s.gpu_type, at.date().isoformat())),
    (("label:team", "type"), lambda s, at: (s.team, s.gpu_type)),
]


@pytest.mark.parametrize("seed", range(3))
def test_sums_equal_a_replay_before_and_after_retention(
    store: Store, database: Database, seed: int
) -> None:
    history = random_history(seed)
    store_history(store, database, history)
    midnight = datetime(2026, 1, 12, tzinfo=UTC)
    windows = [
        (BEGIN - timedelta(days=9), BEGIN + timedelta(days=90)),
        (midnight, midnight + timedelta(days=2)),
    ]

    def require_replay() -> None:
        for low, high in windows:
            for groups, group_of in GROUPINGS:
                query = UsageQuery(from_s=low.timestamp(), to_s=high.timestamp(), groups=groups)
                found = record_sums(store.read(sum_usage, C, query).rows)
                require_equal(found, replay(history, group_of, low, high))

    require_replay()
    odd = BEGIN + timedelta(days=1, hours=3, microseconds=17)  # no job is summed up by day yet
    for low, high in ((windows[0][0], odd), (odd, windows[0][1])):
        query = UsageQuery(from_s=low.timestamp(), to_s=high.timestamp(), groups=("tenant",))
        found = record_sums(store.read(sum_usage, C, query).rows)
        require_equal(found, replay(history, lambda s, at: (s.tenant,), low, high))
    # Retention deletes some jobs, then all.
    some = sorted(history.ended.values())[len(history.ended) // 2]
    age_s = SystemClock().wall_s() - some.timestamp()
    assert store.prune_batch(C, Retention(jobs_s=age_s))["jobs"] > 0
    require_replay()
    assert store.prune_batch(C, Retention(jobs_s=0.0))["jobs"] > 0
    assert store.read(list_jobs, C, (), 0, 10)[0] == []
    require_replay()


def test_ends_and_waits_of_jobs_survive_their_deletion(store: Store, database: Database) -> None:
    history = random_history(7)
    store_history(store, database, history)
    first, last = BEGIN.timestamp(), BEGIN.timestamp() + 90 * DAY_S
    query = UsageQuery(from_s=first, to_s=last, groups=("type",))
    before = store.read(sum_usage, C, query).rows
    assert sum(row.jobs_ended for row in before) == len(history.ended)
    waited_s = sum((ended - BEGIN).total_seconds() for ended in history.ended.values())
    assert sum(row.waited_s for row in before) == pytest.approx(waited_s)
    store.prune_batch(C, Retention(jobs_s=0.0))
    after = {row.group["type"]: row for row in store.read(sum_usage, C, query).rows}
    for row in before:
        kept = after.pop(row.group["type"])
        assert kept.jobs_ended == row.jobs_ended
        assert kept.waited_s == pytest.approx(row.waited_s)
    assert not after


def test_stints_begin_and_end_with_allocations_and_agree_with_the_jobs_service(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    unused = store.read(sum_usage, C, UsageQuery(from_s=0.0, to_s=2e9, groups=("tenant",)))
    assert (unused.rows, unused.capacity) == ((), {"a100": 8})
    store.change(upsert_tenants, C, [TenantSpec(name="nlp", quotas={"a100": 2})])
    submit(store, a_spec("a", tenant="nlp", requested_gpus=2), a_spec("b"))
    snapshot = store.snapshot(C)
    commit(
        store,
        snapshot,
        start(snapshot, "a", [("a100-0", (0, 1))]),
        start(snapshot, "b", [("a100-1", (0,))]),
    )
    hour = UsageQuery(from_s=0.0, to_s=4e9, groups=("tenant", "type"))
    running = {row.group["tenant"]: row for row in store.read(sum_usage, C, hour).rows}
    assert running["nlp"].gpu_s > 0
    assert running["nlp"].lost_gpu_s == running["nlp"].gpu_s  # it has not trained yet
    # Each GPU of this cluster is worth one: all Cells are equally efficient.
    assert running["nlp"].effective_gpu_s == pytest.approx(running["nlp"].gpu_s)
    agents_report(store)
    apply_event(store, "a", JobEvent.CANCEL)
    found = store.read(sum_usage, C, hour)
    used = {row.group["tenant"]: row for row in found.rows}["nlp"]
    assert used.gpu_s == pytest.approx(job(store, "a").service_gpu_s, abs=1e-5)
    assert 0 < used.lost_gpu_s < used.gpu_s
    assert found.quotas == {"nlp": {"a100": 2}}
    assert store.read(sum_usage, C, hour).rows[-1].gpu_s == used.gpu_s  # it has ended
    own = UsageQuery(from_s=0.0, to_s=4e9, groups=("tenant",), tenants={""})
    assert [row.group for row in store.read(sum_usage, C, own).rows] == [{"tenant": ""}]


def test_old_stints_of_a_live_job_are_summed_up(store: Store, database: Database) -> None:
    a_cluster(store)
    submit(store, a_spec("lives"))
    execute(
        database,
        "INSERT INTO stints (job_id, gpu_type, gpus, cpus, effective_gpus, began_at, ended_at, ending)"
        " SELECT j.id, 'a100', 2, 0, 2, t, t + interval '1 hour', 'suspend' FROM jobs j,"
        " generate_series('2026-01-01'::timestamptz, '2026-01-05', interval '1 hour') AS t",
    )
    query = UsageQuery(from_s=0.0, to_s=4e9, groups=("tenant",))
    before = store.read(sum_usage, C, query).rows
    assert store.prune_batch(C, Retention(jobs_s=3600.0))["stints"] == 97 - 50
    assert store.read(sum_usage, C, query).rows == before


async def test_use_is_read_by_call_with_shares_of_capacity_and_quotas(
    store: Store, database: Database
) -> None:
    async with api(store, real_time=True) as a:
        await a.tenants.UpsertTenants(some_tenants(a_tenant("nlp", quotas={"a100": 4, "": 2})))
        await a.jobs.SubmitJob(a_submit("j", tenant="nlp", labels={"team": "x"}))
        execute(
            database,
            "INSERT INTO stints"
            " (job_id, gpu_type, gpus, cpus, effective_gpus, began_at, ended_at, ending)"
            " SELECT id, 'a100', 4, 8, 2, now() - interval '6 hours', now() - interval '2 hours', 'suspend'"
            " FROM jobs",
        )
        request = tenants_pb2.GetUsageRequest(parent=PLACE, group_by=["tenant", "label:team"])
        request.start_time.FromSeconds(int(SystemClock().wall_s()) - 8 * 3600)
        (row,) = (await a.tenants.GetUsage(request)).rows
        assert dict(row.group) == {"tenant": "nlp", "label:team": "x"}
        assert row.gpu_hours == row.lost_gpu_hours == pytest.approx(16.0)
        assert row.effective_gpu_hours == pytest.approx(8.0)
        assert row.cpu_hours == pytest.approx(32.0)
        assert row.preemptions == 1
        assert row.quota_gpu_hours == pytest.approx(4 * 8, rel=1e-2)
        assert row.capacity_share == pytest.approx(4 * 4 / (16 * 8), rel=1e-2)
        assert not row.HasField("mean_waiting_seconds")
        request.tenants.append("other")
        assert not (await a.tenants.GetUsage(request)).rows
        for wrong in ("colour", "label:"):
            request = tenants_pb2.GetUsageRequest(parent=PLACE, group_by=[wrong])
            assert (await refusal_of(a.tenants.GetUsage(request)))[2] == ["group_by[0]"]
        request = tenants_pb2.GetUsageRequest(parent=PLACE)
        request.end_time.FromSeconds(5)
        request.start_time.FromSeconds(5)
        assert (await refusal_of(a.tenants.GetUsage(request)))[2] == ["start_time"]


HOUR_S = 3600.0


def add_stint(
    database: Database, job: str, began_h: float, ended_h: float, gpu_type: str = "a100"
) -> None:
    """Add a stint of 4 GPUs, 8 cores and 100 bytes, which began and ended these hours ago."""
    execute(
        database,
        "INSERT INTO stints (job_id, gpu_type, gpus, cpus, host_bytes, effective_gpus, began_at, ended_at,"
        f" ending) SELECT id, '{gpu_type}', 4, 8, 100, 2, now() - interval '{began_h} hours',"
        f" now() - interval '{ended_h} hours', 'suspend' FROM jobs WHERE name = '{job}'",
    )


def used(snapshot: Snapshot) -> dict[tuple[str, int], float]:
    uses = snapshot.decayed_use
    keys = zip(uses.tenant, uses.resource.tolist(), strict=True)
    return dict(zip(keys, uses.amount.tolist(), strict=True))


def part_of_past(began_h: float, ended_h: float, half_life_h: float) -> float:
    return float(0.5 ** (ended_h / half_life_h) - 0.5 ** (began_h / half_life_h))


def test_stints_decay_by_their_age_and_the_half_life(store: Store, database: Database) -> None:
    a_cluster(store)
    submit(store, a_spec("a", tenant="nlp"), a_spec("b", tenant="nlp"), a_spec("c"))
    for name, began_h, ended_h in (("a", 9, 7), ("a", 7, 2), ("b", 3, 1), ("c", 50, 49)):
        add_stint(database, name, began_h, ended_h)
    add_stint(database, "c", 2, 1, gpu_type="retired")
    for half_life_h in (1.0, 24.0):
        found = used(store.snapshot(C, half_life_h * HOUR_S))
        spans = [(9, 7), (7, 2), (3, 1)]
        nlp = sum(part_of_past(*span, half_life_h) for span in spans)
        other = part_of_past(50, 49, half_life_h) if half_life_h > 2 else 0.0
        cores = part_of_past(2, 1, half_life_h)  # those of a type that is gone count
        assert found["nlp", 0] == pytest.approx(4 * nlp, rel=1e-4)
        cpu_cores, host_memory = HOST_CODES
        assert found["nlp", cpu_cores] == pytest.approx(8 * nlp, rel=1e-4)
        assert found["nlp", host_memory] == pytest.approx(100 * nlp, rel=1e-4)
        assert found.get(("", 0), 0.0) == pytest.approx(4 * other, rel=1e-4)
        assert found["", cpu_cores] == pytest.approx(8 * (other + cores), rel=1e-4)


def test_use_is_read_only_if_it_is_asked_for_and_never_underflows(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    add_stint(database, "a", 10_000, 1_000)
    assert (len(store.snapshot(C).decayed_use), store.snapshot(C).use_half_life_s) == (0, 0.0)
    assert len(store.snapshot(C, 1.0).decayed_use) == 0
    assert store.snapshot(C, 1e9).decayed_use.amount.tolist() == pytest.approx(
        [100 * (p := part_of_past(10_000, 1_000, 1e9 / HOUR_S)), 8 * p, 4 * p]
    )


def test_a_stint_that_lasts_counts_until_now(store: Store, database: Database) -> None:
    a_cluster(store)
    submit(store, a_spec("a", tenant="nlp", requested_gpus=2))
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, "a", [("a100-0", (0, 1))]))
    execute(database, "UPDATE jobs SET since_at = since_at - interval '1 day'")
    assert used(store.snapshot(C, DAY_S))["nlp", 0] == pytest.approx(1.0, rel=1e-3)


def test_retention_keeps_the_use_of_days_as_if_it_was_even(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("a", tenant="nlp"))
    add_stint(database, "a", 24 * 9, 24 * 2)
    apply_event(store, "a", JobEvent.CANCEL)
    before = used(store.snapshot(C, 2 * DAY_S))
    assert store.prune_batch(C, Retention(jobs_s=0.0))["jobs"] == 1
    after = used(store.snapshot(C, 2 * DAY_S))
    assert after.keys() == before.keys()
    # Only the first and the last day are uneven, by at most the decay of a day.
    for key, amount in before.items():
        assert after[key] == pytest.approx(amount, rel=0.15)
    # With a half-life far beyond the history, every second counts the same wherever it was.
    half_life_s = 1e5 * DAY_S
    gpu_s = used(store.snapshot(C, half_life_s))["nlp", 0] * half_life_s / math.log(2.0)
    assert gpu_s == pytest.approx(4 * 7 * DAY_S, rel=1e-3)
    (total,) = store.read(sum_usage, C, UsageQuery(from_s=0.0, to_s=4e9)).rows
    assert total.gpu_s == pytest.approx(4 * 7 * DAY_S)
