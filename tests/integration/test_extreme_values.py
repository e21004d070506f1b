"""Extreme values and hostile messages: refused or stored, and never an internal error."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import grpc.aio
import numpy as np
import pytest
import sqlalchemy as sa
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode

from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.base import limits
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ZeroStage
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.round.grammar import OBJECTIVES
from tessera.service.server.convert import estimates, jobs
from tessera.service.server.convert.estimates import to_workload
from tessera.service.server.convert.names import cluster_name
from tessera.service.server.convert.networks import MAX_BYTES, MAX_MESSAGES
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.worker import SolveProcesses
from tessera.service.server.rpc.serving.servicers import SERVICES
from tessera.solvers.registry import solver_names as solvers
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers.registry import parameters_of
from tessera.solvers.schedulers.registry import scheduler_names as schedulers
from tessera.v1 import (
    clusters_pb2,
    estimates_pb2,
    jobs_pb2,
    tenants_pb2,
)
from tests.support.api import Api, a_cell, a_cluster, a_submit, some_cells, some_nodes
from tests.support.decided_rounds import schedule
from tests.support.execution_plans import a_plan
from tests.support.laws import IS_NIGHT, TIER
from tests.support.logged import logged_lines
from tests.support.messages import broken_bytes, mutate, random_message
from tests.support.methods import methods_of
from tests.support.patience import PATIENCE_S
from tests.support.rpc import CLIENTS_OWN_ERROR, error_details, serving
from tests.support.valid_requests import valid_requests

C: Final = "c"
PARENT: Final = cluster_name(C)
NODES: Final = {"n1": ("a100", 8), "n2": ("a100", 8), "n3": ("v100", 4)}
LAST_S: Final = 253_402_300_799
"""The last second of the year 9999."""
LIMIT_S: Final = 0.3 if IS_NIGHT else 0.1
"""The time limit of solving. Greedy answers even without time, and CBC uses all of it on two cores."""

DRY: Final[dict[str, Any]] = {"cluster": C, "dry_run": True, "remaining_s": lambda: 60.0}
"""Arguments of a round that commits nothing."""

NEVER: Final = 10**9
"""A number of jobs from which on rounds go to another process, which no round here has."""

WAYS: Final[dict[str, dict[str, Any]]] = {
    **{name: {"objective": name} for name in OBJECTIVES},
    **{
        f"{name} then throughput": {"objective": f"{name} then throughput"}
        for name in ("finish-time-fairness", "max-min", "makespan")
    },
    "a sum": {"objective": "0.7*throughput + 0.3*jct"},
    "promises": {
        "objective": "deadline",
        "deadlines": "look-ahead",
        "keep_requests": False,
        "default_run_s": 60.0,
    },
    "plans": {"deadlines": "planned"},
    "myopic": {"deadlines": "myopic", "max_changes": 1, "change_spacing": 1e6},
    "raw": {"raw_throughput": True, "priority_weights": "1:4,2:1"},
    "caution": {"caution": 10.0},
    "fair share": {"fair_share": "drf", "fair_half_life_s": 1.0},
    "watts": {"objective": "cost", "cost_of": "watts", "rate_floor": 1.0},
    **{f"solver {name}": {"solver": name} for name in solvers()},
    **{f"scheduler {name}": {"scheduler": name} for name in schedulers()},
}
"""Ways to decide a round: every objective, solver and published scheduler, and every promise and limit."""


def a_workload(model: str = "bert", **changes: Any) -> estimates_pb2.Workload:
    values: dict[str, Any] = {"model": model, "params": "1B", "global_batch": 256}
    return estimates_pb2.Workload(**(values | changes))


def cell_of(
    workload: estimates_pb2.Workload, gpu_type: str, gpus: int, seconds: float, **rest: Any
) -> estimates_pb2.CellEstimate:
    cell = estimates_pb2.Cell(
        gpu_type=gpu_type, gpus=gpus, pipeline_degree=rest.pop("pipeline_degree", 1)
    )
    values = {"iter_time_s": seconds, "source": estimates_pb2.MEASURED} | rest
    return estimates_pb2.CellEstimate(workload=workload, cell=cell, **values)


def cells_of(workload: estimates_pb2.Workload, **rest: Any) -> list[estimates_pb2.CellEstimate]:
    """Return Cells of 1 to 16 A100 and 1 to 4 V100."""
    sizes = [("a100", 1), ("a100", 4), ("a100", 8), ("a100", 16), ("v100", 1), ("v100", 4)]
    return [
        cell_of(workload, t, n, 10.0 / n if t == "a100" else 20.0 / n, **rest) for t, n in sizes
    ]


async def upsert_cells(a: Api, cells: Iterable[estimates_pb2.CellEstimate]) -> None:
    await a.estimates.UpsertCells(estimates_pb2.UpsertCellsRequest(parent=PARENT, cells=cells))


async def submit(a: Api, name: str, **changes: Any) -> None:
    values: dict[str, Any] = {
        "workload": a_workload(),
        "iterations": 1000,
        "requested_gpus": 4,
    } | changes
    await a.jobs.SubmitJob(
        jobs_pb2.SubmitJobRequest(parent=PARENT, job_id=name, job=jobs_pb2.Job(**values))
    )


async def upsert_tenant(a: Api, name: str, **settings: Any) -> None:
    tenant = tenants_pb2.Tenant(name=f"{PARENT}/tenants/{name}", **settings)
    request = tenants_pb2.UpsertTenantsRequest(parent=PARENT, tenants=[tenant])
    await a.tenants.UpsertTenants(request)


async def upsert_types(a: Api, **changes: Any) -> None:
    kinds = [
        clusters_pb2.GpuType(
            **(
                {"name": name, "memory_bytes": 2**35, "dollars_per_hour": 2.0, "watts": 300.0}
                | changes
            )
        )
        for name in ("a100", "v100")
    ]
    await a.clusters.UpsertCluster(
        clusters_pb2.UpsertClusterRequest(
            cluster=clusters_pb2.Cluster(name=PARENT, gpu_types=kinds)
        )
    )


async def upsert_node(a: Api, store: Store, name: str, gpu_type: str, gpus: int) -> None:
    node = clusters_pb2.Node(name=f"{PARENT}/nodes/{name}", gpu_type=gpu_type, gpus=gpus)
    await a.clusters.UpsertNodes(clusters_pb2.UpsertNodesRequest(parent=PARENT, nodes=[node]))
    store.hello(C, f"agent-{name}", "first", [NodeSpec(name=name, gpu_type=gpu_type, gpus=gpus)])


async def make_cluster(a: Api, store: Store) -> None:
    """Make a cluster on which two jobs run and three wait."""
    await upsert_types(a)
    for name, (gpu_type, gpus) in NODES.items():
        await upsert_node(a, store, name, gpu_type, gpus)
    await upsert_cells(a, cells_of(a_workload()))
    await upsert_tenant(a, "heavy", weight=limits.MAX_TENANT_WEIGHT)
    await submit(a, "first", guaranteed=True)
    await submit(a, "second", deadline=Timestamp(seconds=4_000_000_000))
    schedule(store, cluster=C)
    await submit(a, "third", priority=2)
    await submit(a, "fourth", tenant="lab", requested_gpus=8)
    await submit(a, "fifth", requested_gpus=1, weight=2.0)


def failures_of(loop: RoundLoop, ways: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Decide a round in each of the ways, and return the failures by way."""
    failures = dict[str, str]()
    for name, options in ways.items():
        try:
            done = schedule(loop, RoundOptions(solve_limit_s=LIMIT_S, **options), **DRY)
        except Exception as error:  # noqa: BLE001 # all failures are collected
            failures[name] = repr(error)[:300]
        else:
            if done.summary.outcome != "dry_run":
                failures[name] = f"{done.summary.outcome}: {done.summary.violations[:2]}"
    return failures


async def add_cells_and_job(
    a: Api, name: str, cells: Iterable[estimates_pb2.CellEstimate], **job: Any
) -> None:
    """Add Cells, and a job with the workload of the first Cell."""
    every = list(cells)
    await upsert_cells(a, every)
    await submit(a, name, workload=every[0].workload, **job)


HUGE = a_workload("huge", global_batch=10**9)
TINY = a_workload("tiny", global_batch=1)
SLOW, FAST = estimates.MAX_ITER_TIME_S, estimates.MIN_ITER_TIME_S
ODD = a_workload("odd")
MOST_SENT = estimates_pb2.Sent(bytes=MAX_BYTES, messages=MAX_MESSAGES)


def traffic_of_stage(stage: dict[str, Any], **times: float) -> estimates_pb2.CellTraffic:
    kinds = ("tensor", "data", "expert_data", "expert", "pipeline")
    fields_of_stage: dict[str, Any] = stage | dict.fromkeys(kinds, MOST_SENT)
    stages = [estimates_pb2.StageTraffic(**fields_of_stage)]
    return estimates_pb2.CellTraffic(stages=stages, **times)


Poison = Callable[[Api], Any]

JOBS: dict[str, dict[str, Any]] = {
    "the most iterations": {"iterations": limits.MAX_ITERATIONS},
    "one iteration": {"iterations": 1},
    "one GPU and the greatest weight": {
        "requested_gpus": 1,
        "weight": limits.MAX_WEIGHT,
        "tenant": "heavy",
        "iterations": 1,
    },
    "the greatest weight": {"weight": limits.MAX_WEIGHT},
    "the least weight": {"weight": limits.MIN_WEIGHT},
    "the last queue": {"priority": limits.MAX_PRIORITY},
    "a restart of ten thousand years": {"restart": Duration(seconds=limits.MAX_DURATION_S)},
    "a restart of no time": {"restart": Duration()},
    "a deadline in the year 9999": {"deadline": Timestamp(seconds=LAST_S)},
    "a guarantee of all that there is": {"guaranteed": True, "requested_gpus": 16},
    "a guarantee and the longest restart": {
        "guaranteed": True,
        "restart": Duration(seconds=limits.MAX_DURATION_S),
        "weight": limits.MAX_WEIGHT,
        "iterations": limits.MAX_ITERATIONS,
        "deadline": Timestamp(seconds=LAST_S),
    },
    "no node that it does not avoid": {
        "avoid_nodes": [f"{PARENT}/nodes/{node}" for node in NODES],
        "guaranteed": True,
    },
    "a pinned type, pinned": {
        "requested_gpu_type": "v100",
        "pinned_gpu_type": True,
        "pinned": True,
        "guaranteed": True,
    },
    "a tenant of a hundred letters": {"tenant": "\u00e9" * 100},
    "as many empty labels as allowed": {"labels": {f"{i}": "" for i in range(jobs.MAX_LABELS)}},
}
"""Extreme settings of a job."""

OTHERS: dict[str, Poison] = {
    "the fastest Cell of the largest batch": lambda a: add_cells_and_job(
        a, "x", [cell_of(HUGE, "a100", n, FAST) for n in (1, 8)]
    ),
    "the slowest Cell of the least batch": lambda a: add_cells_and_job(
        a, "x", [cell_of(TINY, "a100", n, SLOW) for n in (1, 8)]
    ),
    "the fastest on one type and the slowest on the other": lambda a: add_cells_and_job(
        a,
        "x",
        [cell_of(ODD, "a100", 1, FAST), cell_of(ODD, "v100", 4, SLOW)],
        iterations=limits.MAX_ITERATIONS,
        weight=limits.MAX_WEIGHT,
    ),
    "a slow job of the greatest weight": lambda a: add_cells_and_job(
        a,
        "x",
        [cell_of(TINY, "v100", 1, SLOW)],
        weight=limits.MAX_WEIGHT,
        iterations=limits.MAX_ITERATIONS,
        deadline=Timestamp(seconds=LAST_S),
        guaranteed=True,
    ),
    "a fast job of the least weight": lambda a: add_cells_and_job(
        a,
        "x",
        [cell_of(HUGE, "v100", 1, FAST)],
        weight=limits.MIN_WEIGHT,
        iterations=1,
        restart=Duration(seconds=limits.MAX_DURATION_S),
    ),
    "more iterations than it could ever do, promised": lambda a: add_cells_and_job(
        a,
        "x",
        [cell_of(TINY, "a100", 8, FAST)],
        deadline=Timestamp(seconds=4_000_000_000),
        iterations=limits.MAX_ITERATIONS,
        guaranteed=True,
    ),
    "the most uncertain Cell": lambda a: add_cells_and_job(
        a,
        "x",
        [cell_of(ODD, "a100", 8, SLOW, sd=estimates.MAX_SD), cell_of(ODD, "v100", 1, FAST, sd=0.0)],
    ),
    "a Cell on as many nodes as GPUs": lambda a: add_cells_and_job(
        a, "x", [cell_of(ODD, "a100", 16, 1.0, nodes=16), cell_of(ODD, "v100", 4, 1.0, nodes=1)]
    ),
    "a Cell of more GPUs than there are": lambda a: add_cells_and_job(
        a, "x", [cell_of(ODD, "a100", limits.MAX_GPUS, 1.0), cell_of(ODD, "a100", 1, 1.0)]
    ),
    "Cells that do not fit": lambda a: add_cells_and_job(
        a, "x", [cell_of(ODD, "a100", 8, 0.0, infeasible=True), cell_of(ODD, "a100", 1, 1.0)]
    ),
    "no Cell at all": lambda a: submit(a, "x", workload=a_workload("unheard of")),
    "a Cell that sends the most": lambda a: add_cells_and_job(
        a,
        "x",
        [
            cell_of(
                ODD,
                "a100",
                16,
                1.0,
                traffic=traffic_of_stage(
                    {"data_parallel": 16, "tensor_parallel": 1},
                    work_flop=1e30,
                    compute_s=1e-9,
                    start_s=0.0,
                ),
            )
        ],
    ),
    "Cells of every count": lambda a: add_cells_and_job(
        a,
        "x",
        [
            cell_of(ODD, "a100", n, 1.0 / n, pipeline_degree=d, execution_plan=plan.to_json())
            for n in range(1, 17)
            for d in range(1, n + 1)
            if n % d == 0
            for zero in ZeroStage
            for plan in [a_plan(to_workload("w", ODD), n, d, zero=zero)]
        ],
    ),
    "a tenant of no weight": lambda a: upsert_tenant(a, "lab", weight=0.0),
    "a tenant of the greatest weight": lambda a: upsert_tenant(
        a, "lab", weight=limits.MAX_TENANT_WEIGHT
    ),
    "a tenant that may use nothing": lambda a: upsert_tenant(
        a, "lab", quotas={"": 0, "a100": 0, "v100": 0}, borrow_gpus=0, keeps_idle_quota=True
    ),
    "a tenant that owns all": lambda a: upsert_tenant(
        a, "other", quotas={"": 20, "a100": 16, "v100": 4}, borrow_gpus=0, keeps_idle_quota=True
    ),
    "a tenant that may borrow the most": lambda a: upsert_tenant(
        a, "lab", quotas={"a100": 0}, borrow_gpus=limits.MAX_QUOTA
    ),
    "GPUs that cost the most": lambda a: upsert_types(
        a,
        dollars_per_hour=limits.MAX_DOLLARS_PER_HOUR,
        watts=limits.MAX_WATTS,
        memory_bytes=limits.MAX_MEMORY_BYTES,
    ),
    "GPUs that cost nothing": lambda a: upsert_types(
        a, dollars_per_hour=0.0, watts=0.0, memory_bytes=1
    ),
    "GPUs that cost next to nothing": lambda a: upsert_types(
        a, dollars_per_hour=5e-324, watts=1e-300
    ),
}
"""Extreme settings of everything else in a cluster."""


EVERY: Final = 1 if IS_NIGHT else 18
"""Each value is tried with one in ``EVERY`` ways, in turn. Only ``make test-night`` leaves none out."""


@pytest.fixture(scope="module")
def processes() -> Iterator[SolveProcesses]:
    """Yield processes for solvers that cannot be interrupted, which all tests share."""
    started = SolveProcesses(on_demand=True, idle_s=PATIENCE_S)
    yield started
    started.close()


@pytest.mark.parametrize("what", [*JOBS, *OTHERS])
async def test_no_accepted_value_breaks_a_round(
    store: Store, processes: SolveProcesses, what: str
) -> None:
    turn = [*JOBS, *OTHERS].index(what)
    ways = {name: way for i, (name, way) in enumerate(WAYS.items()) if (i - turn) % EVERY == 0}
    async with serving(store) as (channel, _):
        a = Api(channel)
        await make_cluster(a, store)
        await (submit(a, "x", **JOBS[what]) if what in JOBS else OTHERS[what](a))
    loop = RoundLoop(store, SystemClock(), processes, from_jobs=NEVER)
    assert failures_of(loop, ways) == {}
    assert schedule(loop, cluster=C).summary.outcome == "committed"
    assert failures_of(loop, ways) == {}  # the job may run now


OPTIONS: tuple[dict[str, Any], ...] = (
    {"restart_horizon_s": 1.0},
    {"restart_horizon_s": 3.2e9},
    {"round_s": 1.0},
    {"round_s": 3.2e9},
    {"default_run_s": 3.2e9},
    {"default_run_s": 1.0},
    {"change_spacing": 0.0},
    {"change_spacing": 1e6},
    {"max_restart_share": 0.0},
    {"max_restart_share": 1 - 2**-53},
    {"defragment_every_rounds": 1},
    {"max_changes": 0},
    {"max_changes": 10**6},
    {"seed": 2**31 - 1},
    {"gap": 1e-300},
    {"gap": 1 - 2**-53},
    {"caution": 10.0},
    {"rate_floor": 0.0, "objective": "cost"},
    {"rate_floor": 1.0, "objective": "cost"},
    {"fairness_levels": 1, "objective": "max-min"},
    {"priority_weights": "1:1e6,2:1e-308"},
    {"priority_weights": "1:0,2:0"},
    {"priority_weights": "1:1e6", "raw_throughput": True},
    {"priority_weights": "1:5e-324"},
    {"objective": "1e308*throughput + 1e-308*jct"},
    {"objective": "5e-324*throughput + 1e308*cost"},
    {"objective": "1e308*throughput + 1e308*jct + 1e308*balanced + 1e308*cost"},
    {"objective": "-1*throughput"},
    {"objective": "-1e308*throughput + 1*jct"},
    {"objective": "max-min within 99.999999999% then throughput"},
    {"objective": "throughput within 0% then jct within 0% then cost"},
    {"deadlines": "look-ahead", "round_s": 3.2e9},
    {"deadlines": "planned", "round_s": 1.0},
    {"solve_limit_s": 1e-9},
    {"network_floor": 1 - 2**-53, "network_levels": 1},
    *(
        {"scheduler": name, "scheduler_parameters": f"{parameter.name}={value}"}
        for name in ("gandiva", "gavel", "sia", "sia-arena", "arena", "arena-deadline")
        for parameter in parameters_of(name)
        for value in parameter.rule.extremes
    ),
)


async def test_no_accepted_option_breaks_a_round(store: Store) -> None:
    async with serving(store) as (channel, _):
        await make_cluster(Api(channel), store)
    for options in OPTIONS:
        try:
            chosen = RoundOptions(**({"solve_limit_s": 1.0} | options))
        except InvalidInput:
            continue
        done = schedule(store, chosen, **DRY)
        assert done.summary.outcome == "dry_run", (options, done.summary.violations)


EXAMPLES: Final = {"quick": 1, "full": 4, "night": 36, "explore": 400}[TIER]
"""The number of messages of each sort for each method."""
SEED: Final = int(os.environ.get("HOSTILE_SEED", "0"))
OTHER_SERVICES: Final = {"tessera.v1.Webhooks"}  # the benchmark of hostile clients calls them
METHODS: Final = methods_of(*(name for name in SERVICES if name not in OTHER_SERVICES))
WRONG: Final = frozenset({StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.DEADLINE_EXCEEDED})


def test_every_method_has_a_valid_request_here() -> None:
    assert {name.rpartition("/")[2] for name in METHODS} == set(valid_requests())
    assert {name.split("/")[1] for name in METHODS} == set(SERVICES) - OTHER_SERVICES


async def call_raw(channel: Any, path: str, messages: list[bytes]) -> StatusCode:
    """Make a call with raw bytes, and return its code. For a watched job, the first answer is enough."""
    method = METHODS[path]
    if method.client_streaming:
        return await _stream(channel.stream_stream(path)(timeout=PATIENCE_S), path, messages)
    try:
        if not method.server_streaming:
            await channel.unary_unary(path)(messages[0], timeout=PATIENCE_S)
            return StatusCode.OK
        answers = channel.unary_stream(path)(messages[0], timeout=PATIENCE_S)
        async for _ in answers:
            answers.cancel()
            break
    except grpc.aio.AioRpcError as error:
        _check_error(path, error)
        return error.code()
    return StatusCode.OK


async def _stream(stream: Any, path: str, messages: list[bytes]) -> StatusCode:
    """Send messages until the server ends the stream or no message is left, and return its code."""
    # The errors mean that the server has ended the stream.
    ended = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)
    with contextlib.suppress(*ended):
        for message in messages:
            await stream.write(message)
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            continue
    code: StatusCode = await stream.code()
    details = await stream.details()
    # The server ended the stream first. Its log says how, which the test checks at its end.
    if details == CLIENTS_OWN_ERROR:
        return StatusCode.CANCELLED
    assert code not in WRONG, (path, code, details)
    return code


def _check_error(path: str, error: grpc.aio.AioRpcError) -> None:
    assert error.code() not in WRONG, (path, error.code(), error.details())
    info, _ = error_details(error)
    assert info.domain == "tessera"
    assert info.reason


async def make_resources(api: Api, channel: grpc.aio.Channel) -> None:
    """Create the resources of the valid requests, such as a cluster, a job, a round and a topology."""
    await api.clusters.UpsertCluster(a_cluster("a100", "v100"))
    await api.clusters.UpsertNodes(some_nodes("n1", "n2"))
    await api.estimates.UpsertCells(some_cells(a_cell(1), a_cell(8)))
    await api.jobs.SubmitJob(a_submit())
    for name in ("UpdateTopology", "UpsertTenants", "Schedule"):
        path = next(path for path in METHODS if path.endswith(f"/{name}"))
        (request,) = valid_requests()[name]
        assert await call_raw(channel, path, [request.SerializeToString()]) is StatusCode.OK


MIXED_JOBS: Final = """
SELECT a.job_id FROM allocations a JOIN nodes n ON n.id = a.node_id
GROUP BY a.job_id, a.generation HAVING count(DISTINCT n.gpu_type_id) > 1
"""
HELD_TWICE: Final = """
SELECT node_id, gpu FROM allocations WHERE hold IN ('held', 'releasing')
GROUP BY node_id, gpu HAVING count(*) > 1
"""
REALS: Final = """
SELECT table_name, column_name FROM information_schema.columns
WHERE table_schema = 'public' AND data_type = 'double precision'
"""


def check_rows(database: Database) -> None:
    """Check all stored rows as far as SQL can."""
    with database.engine.connect() as connection:
        for query in (MIXED_JOBS, HELD_TWICE):
            assert not connection.execute(sa.text(query)).all(), query
        for table, column in connection.execute(sa.text(REALS)).all():
            query = f"SELECT count(*) FROM {table} WHERE {column} = 'NaN'"
            assert not connection.execute(sa.text(query)).scalar_one(), (table, column)


async def check_service(channel: Any) -> None:
    """Check that the server still serves, and can read everything that is stored."""
    for name in (
        "ListClusters",
        "ListNodes",
        "ListCells",
        "ListModels",
        "ListJobs",
        "ListRounds",
        "ListTenants",
        "GetTopology",
        "GetCluster",
    ):
        path = next(path for path in METHODS if path.endswith(f"/{name}"))
        (request,) = valid_requests()[name]
        code = await call_raw(channel, path, [request.SerializeToString()])
        assert code in (StatusCode.OK, StatusCode.NOT_FOUND), (name, code)


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.rpartition("/")[2])
async def test_hostile_messages_are_answered_and_do_no_harm(
    store: Store, database: Database, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = METHODS[path]
    rng = np.random.default_rng([SEED, *path.encode()])
    access = Store(database)
    async with serving(store, default_deadline_s=20.0, access=access) as (channel, _):
        await make_resources(Api(channel), channel)
        for _ in range(EXAMPLES):
            valid = valid_requests()[method.name]
            at = int(rng.integers(len(valid)))
            for sort in (
                random_message(method.input_type, rng),
                mutate(valid[at], rng),
                mutate(valid[at], rng, most=1),
            ):
                messages = [*valid[:at], sort, *valid[at + 1 :]]
                await call_raw(channel, path, [message.SerializeToString() for message in messages])
            raw = [message.SerializeToString() for message in valid]
            raw[at] = broken_bytes(valid[at], rng)
            await call_raw(channel, path, raw)
        await check_service(channel)
    await asyncio.to_thread(check_rows, database)
    assert not logged_lines(caplog, "rpc_failed")
