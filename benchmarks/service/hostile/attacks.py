"""The kinds of hostile calls. Each is bounded in count and in time."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Mapping
from typing import Final

from google.protobuf.field_mask_pb2 import FieldMask

from tessera.benchmarks.service.hostile.caller import (
    AN_HOUR_S,
    AttackOrders,
    Caller,
    call_from_threads,
)
from tessera.benchmarks.service.hostile.documents import (
    MIB,
    hostile_architectures,
    hostile_texts,
    hostile_topologies,
    nest_brackets,
)
from tessera.benchmarks.service.hostile.requests import (
    ATTACKED_CLUSTER,
    CROWDED_CLUSTER,
    FLOODED_CLUSTER,
    GPU_TYPE,
    cluster_name,
    sample_requests,
    submit_request,
    workload_on,
)
from tessera.benchmarks.service.hostile.tally import CallTally
from tessera.benchmarks.service.hostile.unread import leave_unread
from tessera.v1 import (
    clusters_pb2,
    estimates_pb2,
    jobs_pb2,
    networks_pb2,
    scheduler_pb2,
    tenants_pb2,
)

PATIENCE_S: Final = 5.0
"""The deadline of a call that a reader of documents should refuse immediately."""

MAX_ARCHITECTURE: Final = 65_536
MAX_DOCUMENT: Final = 16 * MIB
LARGEST_TEXT_CHARS: Final = 63 * MIB
"""The number of characters that still fit into a message of 64 MiB."""

UPSERT_MODELS: Final = "/tessera.v1.Estimates/UpsertModels"
UPDATE_TOPOLOGY: Final = "/tessera.v1.Networks/UpdateTopology"
SCHEDULE: Final = "/tessera.v1.Scheduler/Schedule"
REPLAY: Final = "/tessera.v1.Scheduler/ReplayRound"
LIST_JOBS: Final = "/tessera.v1.Jobs/ListJobs"


def send_documents(attack: AttackOrders) -> CallTally:
    """Send documents that expand, in every field that takes a document."""
    calls = list(document_calls(attack))

    def send(caller: Caller) -> None:
        what, path, make = calls[int(caller.rng.integers(len(calls)))]
        caller.call(path, make(), timeout_s=PATIENCE_S, what=what)

    return call_from_threads(attack, attack.scaled(16, 2), send, attack.scaled(20_000, 200))


DocumentCall = tuple[str, str, Callable[[], bytes]]
"""A description, the method's path, and a function that makes the request."""


def document_calls(attack: AttackOrders) -> list[DocumentCall]:
    """Return the calls that carry a hostile document or text."""
    result: list[DocumentCall] = []
    texts = [*hostile_texts(MAX_ARCHITECTURE), *hostile_architectures()]
    for name, text in texts:
        result.append((f"architecture: {name}", UPSERT_MODELS, _serve(_models(text))))
    size = attack.scaled(MAX_DOCUMENT, MIB)
    links = attack.scaled(100_000, 1_000)
    for name, text in [*hostile_texts(size), *hostile_topologies(links)]:
        result.append((f"topology: {name}", UPDATE_TOPOLOGY, _serve(_topology(text))))
    large = attack.scaled(LARGEST_TEXT_CHARS, MIB)
    result.append(("architecture: far too long", UPSERT_MODELS, lambda: _models("[" * large)))
    result.append(("topology: far too long", UPDATE_TOPOLOGY, lambda: _topology("[" * large)))
    for name, text in (
        ("brackets", nest_brackets(300)),
        ("a text", "x" * MIB),
        ("a number", "9" * 900),
    ):
        token = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
        request = jobs_pb2.ListJobsRequest(parent=cluster_name(ATTACKED_CLUSTER), page_token=token)
        result.append((f"page token: {name}", LIST_JOBS, _serve(request.SerializeToString())))
    for name, objective in (
        ("thens", " then ".join(["throughput"] * 90)),
        ("pluses", "+" * 999),
        ("digits", "9" * 900 + "*throughput"),
        ("a long text", "x" * MIB),
        ("within", "jct within 9" + "9" * 900 + " %"),
    ):
        options = scheduler_pb2.RoundOptions(objective=objective)
        result.append((f"objective: {name}", SCHEDULE, _serve(_dry_run(options))))
    weights = ",".join(f"{k}:1" for k in range(1, 200))
    options = scheduler_pb2.RoundOptions(priority_weights=weights)
    result.append(("queue weights", SCHEDULE, _serve(_dry_run(options))))
    for name, parameters in (
        ("unknown names", ",".join(f"p{k}=1" for k in range(150))),
        ("a long number", "depth=" + "9" * 900),
        ("equals signs", "=" * 900),
        ("a long text", "x" * MIB),
    ):
        options = scheduler_pb2.RoundOptions(scheduler="arena", scheduler_parameters=parameters)
        result.append((f"scheduler parameters: {name}", SCHEDULE, _serve(_dry_run(options))))
    return result


def _serve(raw: bytes) -> Callable[[], bytes]:
    return lambda: raw


def _models(text: str) -> bytes:
    model = estimates_pb2.Model(model="hostile", params="1B", architecture=text)
    return estimates_pb2.UpsertModelsRequest(
        parent=cluster_name(ATTACKED_CLUSTER), models=[model], validate_only=True
    ).SerializeToString()


def _topology(text: str) -> bytes:
    topology = networks_pb2.Topology(
        name=f"{cluster_name(ATTACKED_CLUSTER)}/topology", document=text
    )
    return networks_pb2.UpdateTopologyRequest(
        topology=topology, validate_only=True
    ).SerializeToString()


def _dry_run(options: scheduler_pb2.RoundOptions, cluster: str = CROWDED_CLUSTER) -> bytes:
    return scheduler_pb2.ScheduleRequest(
        parent=cluster_name(cluster), options=options, dry_run=True
    ).SerializeToString()


FAIR_OBJECTIVE: Final = (
    "max-min within 5% then finish-time-fairness within 1% then makespan then throughput"
)


FAIRNESS_LEVELS: Final = (1000, 64)
"""The numbers of fairness levels in hostile options: far too many, and the highest allowed."""


def hostile_options() -> list[scheduler_pb2.RoundOptions]:
    """Return options for the longest possible rounds, within the limits and beyond them."""
    options, many, eight = scheduler_pb2.RoundOptions, many_goals(1000), many_goals(140)
    result = []
    for levels in FAIRNESS_LEVELS:
        result += [
            options(objective=FAIR_OBJECTIVE, fairness_levels=levels, gap=1e-9),
            options(objective="max-min then jct", fairness_levels=levels, solver="cp-sat"),
            options(objective=FAIR_OBJECTIVE, fairness_levels=levels, solver="lp"),
        ]
    for objective in (many, eight):
        result += [
            options(objective=objective, gap=1e-9),
            options(objective=objective, solver="cp-sat", gap=1e-9),
        ]
    for solver in ("portfolio", "cp-sat", "cbc", "cvxpy"):
        result.append(options(objective="throughput", solver=solver, gap=1e-12))
    result.append(options(objective="jct", deadlines="planned", caution=10, change_spacing=0))
    return result


def many_goals(characters: int) -> str:
    """Return an objective of as many distinct stages as fit into ``characters``."""
    stages: list[str] = []
    for k in itertools.count(1):
        stage = f"{k}*jct+throughput"
        if len(" then ".join([*stages, stage])) > characters:
            return " then ".join(stages)
        stages.append(stage)
    raise AssertionError("unreachable")


def ask_for_rounds(attack: AttackOrders) -> CallTally:
    """Ask for dry runs and replays of large rounds, with an hour's deadline each."""
    options = hostile_options()
    replays = [
        scheduler_pb2.ReplayRoundRequest(
            name=f"{cluster_name(CROWDED_CLUSTER)}/rounds/1", with_snapshot=True
        ),
        *(
            scheduler_pb2.ReplayRoundRequest(
                name=f"{cluster_name(CROWDED_CLUSTER)}/rounds/1", options=chosen
            )
            for chosen in options
        ),
    ]

    def ask(caller: Caller) -> None:
        if caller.rng.random() < 0.75:
            chosen = options[int(caller.rng.integers(len(options)))]
            caller.call(SCHEDULE, _dry_run(chosen), timeout_s=AN_HOUR_S, what="dry run")
        else:
            request = replays[int(caller.rng.integers(len(replays)))]
            caller.call(REPLAY, request.SerializeToString(), timeout_s=AN_HOUR_S)

    return call_from_threads(attack, attack.scaled(64, 4), ask, attack.scaled(10_000, 100))


def list_everything(attack: AttackOrders) -> CallTally:
    """List all jobs in pages of the largest size, and everything else that can be listed."""
    others = [
        (path, request.SerializeToString())
        for path, request in sample_requests(CROWDED_CLUSTER).items()
        if "/List" in path
    ]

    def follow(caller: Caller) -> None:
        request = jobs_pb2.ListJobsRequest(parent=cluster_name(FLOODED_CLUSTER), page_size=10_000)
        while not attack.is_over:
            answer = caller.call(LIST_JOBS, request.SerializeToString(), timeout_s=AN_HOUR_S)
            if answer is None:
                break
            request.page_token = jobs_pb2.ListJobsResponse.FromString(answer).next_page_token
            if not request.page_token:
                break
        for path, message in others:
            caller.call(path, message, timeout_s=AN_HOUR_S)

    return call_from_threads(attack, attack.scaled(16, 2), follow, attack.scaled(2_000, 20))


def submit_floods(attack: AttackOrders) -> CallTally:
    """Submit the highest allowed number of jobs per call from many threads."""
    path, size = "/tessera.v1.Jobs/SubmitJobs", attack.scaled(40_000, 100)
    batch = min(10_000, size)
    real = submit_request(FLOODED_CLUSTER, batch).SerializeToString()
    checked = submit_request(FLOODED_CLUSTER, batch, validate_only=True).SerializeToString()

    def submit(caller: Caller) -> None:
        raw = checked if caller.rng.random() < 0.5 else real
        caller.call(path, raw, timeout_s=AN_HOUR_S)

    return call_from_threads(attack, attack.scaled(32, 2), submit, attack.scaled(100, 4))


def call_impatiently(attack: AttackOrders) -> CallTally:
    """Call every method with a deadline of 1 to 50 ms, or leave after that time."""
    requests = [(p, r.SerializeToString()) for p, r in sample_requests().items()]
    requests.append((SCHEDULE, _dry_run(hostile_options()[0])))

    def hurry(caller: Caller) -> None:
        path, message = requests[int(caller.rng.integers(len(requests)))]
        seconds = float(caller.rng.uniform(0.001, 0.05))
        if caller.rng.random() < 0.5:
            caller.call(path, message, timeout_s=seconds)
        else:
            caller.call(path, message, timeout_s=60.0, leave_after_s=seconds)

    return call_from_threads(attack, attack.scaled(32, 2), hurry, attack.scaled(200_000, 500))


def flood_resources(attack: AttackOrders) -> CallTally:
    """Create large numbers of clusters, models, tenants, nodes and workloads."""

    def fill(caller: Caller) -> None:
        turn = attack.next_turn()
        make = FLOODS[int(caller.rng.integers(len(FLOODS)))]
        path, message = make(turn, attack)
        caller.call(path, message, timeout_s=60.0)

    return call_from_threads(attack, attack.scaled(16, 2), fill, attack.scaled(40_000, 100))


Flood = Callable[[int, AttackOrders], tuple[str, bytes]]


def _empty_cluster(turn: int, attack: AttackOrders) -> tuple[str, bytes]:
    gpu_type = clusters_pb2.GpuType(name=GPU_TYPE, memory_bytes=1)
    cluster = clusters_pb2.Cluster(
        name=cluster_name(f"empty-{attack.seed}-{turn}"), gpu_types=[gpu_type]
    )
    request = clusters_pb2.UpsertClusterRequest(cluster=cluster)
    return "/tessera.v1.Clusters/UpsertCluster", request.SerializeToString()


def _models_of_one_call(turn: int, attack: AttackOrders) -> tuple[str, bytes]:
    text = (
        "{architecture: transformer, layers: 96, hidden: 64, heads: 2, sequence: 64, vocabulary: 9}"
    )
    models = [
        estimates_pb2.Model(model=f"m{turn}", params=f"{k}B", architecture=text)
        for k in range(attack.scaled(1000, 10))
    ]
    request = estimates_pb2.UpsertModelsRequest(parent=cluster_name(FLOODED_CLUSTER), models=models)
    return UPSERT_MODELS, request.SerializeToString()


def _tenants_of_one_call(turn: int, attack: AttackOrders) -> tuple[str, bytes]:
    place = cluster_name(FLOODED_CLUSTER)
    tenants = [
        tenants_pb2.Tenant(name=f"{place}/tenants/t{turn}-{k}", weight=1.0)
        for k in range(attack.scaled(10_000, 100))
    ]
    request = tenants_pb2.UpsertTenantsRequest(parent=place, tenants=tenants)
    return "/tessera.v1.Tenants/UpsertTenants", request.SerializeToString()


def _nodes_of_one_call(turn: int, attack: AttackOrders) -> tuple[str, bytes]:
    place = cluster_name(FLOODED_CLUSTER)
    nodes = [
        clusters_pb2.Node(name=f"{place}/nodes/n{turn}-{k}", gpu_type=GPU_TYPE, gpus=64)
        for k in range(attack.scaled(4_000, 10))
    ]
    request = clusters_pb2.UpsertNodesRequest(parent=place, nodes=nodes)
    return "/tessera.v1.Clusters/UpsertNodes", request.SerializeToString()


def _job_of_a_new_workload(turn: int, attack: AttackOrders) -> tuple[str, bytes]:
    job = jobs_pb2.Job(
        iterations=1, requested_gpus=8, workload=workload_on(turn), tenant=f"t{turn}"
    )
    request = jobs_pb2.SubmitJobRequest(parent=cluster_name(FLOODED_CLUSTER), job=job)
    return "/tessera.v1.Jobs/SubmitJob", request.SerializeToString()


def _new_labels(turn: int, attack: AttackOrders) -> tuple[str, bytes]:
    name = f"{cluster_name(ATTACKED_CLUSTER)}/jobs/steady-0"
    job = jobs_pb2.Job(name=name, labels={"turn": str(turn)})
    request = jobs_pb2.UpdateJobRequest(job=job, update_mask=FieldMask(paths=["labels"]))
    return "/tessera.v1.Jobs/UpdateJob", request.SerializeToString()


FLOODS: Final[tuple[Flood, ...]] = (
    *[_empty_cluster] * 6,
    _models_of_one_call,
    _tenants_of_one_call,
    _nodes_of_one_call,
    *[_job_of_a_new_workload] * 4,
    _new_labels,
)

KINDS: Final[Mapping[str, Callable[[AttackOrders], CallTally]]] = {
    "documents": send_documents,
    "rounds": ask_for_rounds,
    "unread": leave_unread,
    "submits": submit_floods,
    "lists": list_everything,
    "impatient": call_impatiently,
    "floods": flood_resources,
}
"""The kinds of attacks by name, in the order in which they are run."""
