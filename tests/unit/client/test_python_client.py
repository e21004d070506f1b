"""The Python client against servers that fail in prepared ways, and what it needs to be installed."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from tessera import client as package
from tessera.client import (
    PLAIN_TEXT,
    AsyncClient,
    CallError,
    ChannelRefused,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    JobNotSucceeded,
    ServerTooOld,
    Unavailable,
    make_job,
)
from tessera.client import errors as client_errors
from tessera.client.aio import AsyncStubs
from tessera.client.requests import JobFields, field_path, prepare
from tessera.client.sync import Stubs
from tessera.formulation.base import errors
from tessera.formulation.job.launch import SecretVariable
from tessera.service.server.convert.jobs import to_job_spec
from tessera.service.server.rpc.serving.errors import CODES, code_of, status_of
from tessera.v1 import access_pb2, estimates_pb2, jobs_pb2, jobs_pb2_grpc, launch_pb2, scheduler_pb2
from tests.support.local_server import serve_grpc

ROOT = Path(__file__).parents[3]
PROTO = ROOT / "proto"

FAILURES = [
    errors.InvalidInput("job.iterations", "must be at least 1"),
    errors.NotFound("clusters/c/jobs/j"),
    errors.AlreadyExists("clusters/c/jobs/j"),
    errors.StaleEtag("it changed"),
    errors.Unavailable("the database does not answer"),
]


class Jobs(jobs_pb2_grpc.JobsServicer):
    """A servicer that fails first, as often and as prepared."""

    def __init__(self) -> None:
        self.failures: list[errors.TesseraError] = []
        self.requests: list[Any] = []

    def _fail(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        if self.failures:
            context.abort_with_status(rpc_status.to_status(status_of(self.failures.pop(0))))

    def SubmitJob(self, request: Any, context: Any) -> jobs_pb2.Job:
        self._fail(request, context)
        return jobs_pb2.Job(name=f"{request.parent}/jobs/{request.job_id}")

    def GetJob(self, request: Any, context: Any) -> jobs_pb2.Job:
        self._fail(request, context)
        return jobs_pb2.Job(name=request.name)

    def ListJobs(self, request: Any, context: Any) -> jobs_pb2.ListJobsResponse:
        self._fail(request, context)
        number = int(request.page_token or 0)
        jobs = [jobs_pb2.Job(name=f"clusters/c/jobs/{number}-{k}") for k in range(2)]
        token = str(number + 1) if number < 2 else ""
        return jobs_pb2.ListJobsResponse(jobs=jobs, next_page_token=token)

    def WatchJob(self, request: Any, context: Any) -> Iterator[jobs_pb2.Job]:
        for state in (jobs_pb2.QUEUED, jobs_pb2.RUNNING, jobs_pb2.FAILED):
            yield jobs_pb2.Job(name=request.name, state=state, last_error="exit status 3")
            if state == jobs_pb2.RUNNING:
                self._fail(request, context)

    def ReadLogs(self, request: Any, context: Any) -> Iterator[jobs_pb2.ReadLogsResponse]:
        self._fail(request, context)
        yield jobs_pb2.ReadLogsResponse(data=b"one")
        if request.follow:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it went away")


@pytest.fixture
def server() -> Iterator[tuple[Jobs, str]]:
    """Yield the servicer of a server, and the server's address."""
    jobs = Jobs()  # type: ignore[abstract] # other methods are not called
    with serve_grpc(partial(jobs_pb2_grpc.add_JobsServicer_to_server, jobs)) as address:
        yield jobs, address


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.client.retries.FIRST_PAUSE_S", 0.001)


def a_client(address: str, **more: Any) -> Client:
    return Client(address, "c", settings=PLAIN_TEXT, **more)


@pytest.mark.parametrize("failure", FAILURES[:4], ids=lambda error: error.reason)
def test_an_error_is_typed_and_keeps_its_reason_field_and_facts(
    server: tuple[Jobs, str], failure: errors.TesseraError
) -> None:
    jobs, address = server
    jobs.failures = [failure]
    with a_client(address) as client, pytest.raises(CallError) as failed:
        client.get_job("j")
    error = failed.value
    assert type(error) is client_errors.KINDS[code_of(failure)]
    assert (str(error), error.reason) == (str(failure), failure.reason)
    assert dict(error.facts) == failure.metadata()
    assert error.field == ("job.iterations" if isinstance(error, InvalidRequest) else "")
    if isinstance(error, InvalidRequest):
        assert error.violations[0].description == "must be at least 1"
    assert len(jobs.requests) == 1  # trying again would not help


def test_there_is_a_documented_class_for_each_code_that_the_server_uses(
    server: tuple[Jobs, str],
) -> None:
    kinds = set(client_errors.KINDS.values())
    assert set(CODES.values()) <= set(client_errors.KINDS)
    assert len(kinds) == len(client_errors.KINDS)
    assert issubclass(DeadlineExceeded, TimeoutError)
    assert all(issubclass(kind, CallError) for kind in kinds)
    page = (ROOT / "docs" / "python-client.md").read_text()
    exported = {
        name
        for name, value in vars(package).items()
        if inspect.isclass(value) and name in vars(client_errors)
    }
    assert {kind.__name__ for kind in kinds} <= exported
    assert [name for name in exported if f"`{name}`" not in page] == []
    with a_client(server[1]) as client, pytest.raises(ServerTooOld):
        client.get_server()


def test_a_call_that_changes_something_is_tried_again_with_the_same_request_id(
    server: tuple[Jobs, str],
) -> None:
    jobs, address = server
    jobs.failures = [FAILURES[4], FAILURES[4]]
    with a_client(address) as client:
        client.submit(name="j", model="bert", batch=8, iterations=10, gpus=1)
        client.submit(name="k", model="bert", batch=8, iterations=10, gpus=1)
    ids = [request.request_id for request in jobs.requests]
    assert len(ids) == 4
    assert len(set(ids[:3])) == 1
    assert all(ids)
    assert ids[3] != ids[0]


def test_only_what_happens_once_is_tried_again_and_messages_of_the_caller_never_change() -> None:
    given = jobs_pb2.CancelJobRequest(name="n", request_id="mine")
    sent, repeatable = prepare(given)
    assert (sent.request_id, repeatable) == ("mine", True)
    empty = jobs_pb2.CancelJobRequest(name="n")
    assert prepare(empty)[0].request_id
    assert not empty.request_id
    for read in (jobs_pb2.GetJobRequest(), jobs_pb2.ExplainJobRequest()):
        assert prepare(read)[1]
    assert prepare(scheduler_pb2.ScheduleRequest())[1]  # it carries a request id
    assert not prepare(access_pb2.CreateTokenRequest())[1]  # it does not, and makes something


def test_nobody_waits_for_a_server_for_longer_than_wanted() -> None:
    with a_client("127.0.0.1:1", retry_s=0.0) as client, pytest.raises(Unavailable) as failed:
        client.get_job("j")
    assert "no server answers at 127.0.0.1:1" in str(failed.value)
    assert failed.value.reason == ""


async def test_the_stubs_of_all_services_for_users_are_there() -> None:
    services = {
        path.name.removesuffix("_pb2_grpc.py")
        for path in (PROTO / "gen" / "tessera" / "v1").glob("*_pb2_grpc.py")
        if re.search(r"^class \w+Stub\b", path.read_text(), re.MULTILINE)
    }
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        assert set(vars(Stubs(channel))) == services - {"agents"}
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        assert set(vars(AsyncStubs(channel))) == services - {"agents"}


def test_lists_are_iterators_over_all_pages(server: tuple[Jobs, str]) -> None:
    jobs, address = server
    with a_client(address) as client:
        listed = client.list_jobs(["queued", "RUNNING"])
        assert jobs.requests == []  # nothing is read before it is needed
        names = [job.name.rpartition("/")[2] for job in listed]
    assert names == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert list(jobs.requests[0].states) == [jobs_pb2.QUEUED, jobs_pb2.RUNNING]


def test_a_watch_goes_on_when_the_server_comes_back(server: tuple[Jobs, str]) -> None:
    jobs, address = server
    jobs.failures = [FAILURES[4]]
    with a_client(address) as client:
        states = [job.state for job in client.watch("j")]
        assert states[-1] == jobs_pb2.FAILED
        assert states[:2] == [jobs_pb2.QUEUED, jobs_pb2.RUNNING]
        assert client.wait("j").state == jobs_pb2.FAILED
        with pytest.raises(JobNotSucceeded, match="j failed: exit status 3") as failed:
            client.wait("j", check=True)
        assert failed.value.state == "FAILED"


def test_a_stream_is_tried_again_until_its_first_answer(server: tuple[Jobs, str]) -> None:
    jobs, address = server
    jobs.failures = [FAILURES[4], FAILURES[4]]
    with a_client(address) as client:
        assert [part.data for part in client.read_logs("j")] == [b"one"]
        assert len(jobs.requests) == 3
        with pytest.raises(Unavailable):
            list(client.read_logs("j", follow=True))
    assert len(jobs.requests) == 4


async def test_the_client_for_asyncio_does_the_same(server: tuple[Jobs, str]) -> None:
    jobs, address = server
    jobs.failures = [FAILURES[4]]
    async with AsyncClient(address, "c", settings=PLAIN_TEXT) as client:
        job = await client.submit(name="j", model="bert", batch=8, iterations=10, gpus=1)
        assert job.name == "clusters/c/jobs/j"
        assert len({request.request_id for request in jobs.requests}) == 1
        assert len([job async for job in client.list_jobs()]) == 6
        first, second = await asyncio.gather(client.get_job("a"), client.get_job(job))
        assert (first.name, second.name) == ("clusters/c/jobs/a", "clusters/c/jobs/j")
        assert (await client.wait(job)).state == jobs_pb2.FAILED
        jobs.failures = [FAILURES[0]]
        with pytest.raises(InvalidRequest) as failed:
            await client.get_job("j")
        assert failed.value.field == "job.iterations"


def test_a_job_is_described_by_short_names() -> None:
    deadline, minutes = datetime(2030, 1, 1, tzinfo=UTC), timedelta(minutes=2)
    ended = jobs_pb2.Dependency(job="clusters/c/jobs/x", condition=jobs_pb2.Dependency.ENDED)
    job = make_job(
        "c",
        model="bert",
        params="1.3B",
        batch=256,
        iterations=9,
        gpus=8,
        gpu_type="a100",
        allowed_gpu_types=["a100"],
        avoid_nodes=["n0"],
        longest_run=minutes,
        after=["prepare", ended],
        techniques=["dp", "zero1"],
        command=["train.py"],
        runtime="torchrun",
        env={"A": "b"},
        workdir="/srv",
        secrets={"WANDB_API_KEY": "wandb"},
        staging_command=["cp", "a", "b"],
        progress_pattern="(?P<iteration>[0-9]+)",
        stop_grace=minutes,
        restart=timedelta(seconds=1.5),
        deadline=deadline,
        max_retries=0,
        until_exit=True,
    )
    spec = to_job_spec("job", "c", "j", job)
    launch = spec.launch
    assert (spec.workload.global_batch, spec.requested_gpu_type) == (256, "a100")
    assert (spec.allowed_gpu_types, spec.avoid_nodes) == (("a100",), ("n0",))
    dependencies = [(one.job, str(one.condition)) for one in spec.after]
    assert dependencies == [("prepare", "succeeded"), ("x", "ended")]
    assert spec.techniques == ("dp", "zero1")
    assert (spec.restart_s, spec.longest_run_s, launch.stop_grace_s) == (1.5, 120.0, 120.0)
    assert (spec.deadline_s, spec.max_retries) == (deadline.timestamp(), 0)
    assert launch.secrets == (SecretVariable(variable="WANDB_API_KEY", name="wandb"),)
    assert (dict(launch.env), launch.until_exit) == ({"A": "b"}, True)
    assert (launch.staging_command, launch.workdir) == (("cp", "a", "b"), "/srv")
    bare = make_job(model="bert")
    assert not bare.HasField("max_retries")
    assert not bare.HasField("launch")
    assert make_job(deadline=timedelta(days=1)).deadline.seconds > 0
    with pytest.raises(ValueError, match="time zone"):
        make_job(deadline=datetime(2030, 1, 1))  # noqa: DTZ001 - that is the point


MEANT_FIELDS = {
    **{"max_gpu": "max_gpus", "deadlin": "deadline", "tenants": "tenant", "batches": "batch"},
    **{"global_batch": "batch", "requested_gpus": "gpus", "environment": ""},
    **{"state": "", "xyz": ""},
}


@pytest.mark.parametrize(("field", "meant"), MEANT_FIELDS.items())
def test_an_unknown_field_of_a_job_is_refused_with_the_one_that_is_meant(
    field: str, meant: str
) -> None:
    unknown: dict[str, Any] = {field: 1}
    expected = f"no field '{field}'" + (f"; did you mean '{meant}'" if meant else "")
    with a_client("127.0.0.1:1") as client, pytest.raises(TypeError, match=expected):
        client.submit(model="bert", **unknown)

    async def submit() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            await client.submit(model="bert", **unknown)

    with pytest.raises(TypeError, match=expected):
        asyncio.run(submit())


SERVERS_FIELDS = {
    *("name", "etag", "state", "create_time", "start_time", "end_time", "iterations_done"),
    *("allocation", "reason", "generation", "retries", "last_error", "admitted"),
    *("schedule", "opportunistic", "service_gpu_seconds", "queue_time", "retry_time"),
    *("warnings", "training", "forecast", "run_seconds", "array", "start_by"),
    "planned_start",
}
"""The fields of a job that only the server writes."""
REFUSED_FIELDS = {"launch.image"}


def test_every_field_of_a_job_that_users_state_has_a_short_name() -> None:
    fields = {field.name for field in jobs_pb2.Job.DESCRIPTOR.fields}
    workload = {f"workload.{field.name}" for field in estimates_pb2.Workload.DESCRIPTOR.fields}
    launch = {f"launch.{field.name}" for field in launch_pb2.Launch.DESCRIPTOR.fields}
    stated = (fields - SERVERS_FIELDS - {"workload", "launch"}) | workload | launch
    assert {field_path(name) for name in JobFields.__annotations__} == stated - REFUSED_FIELDS


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"command": "python train.py"}, "command must not be a text; give a list of texts"),
        ({"allowed_gpu_types": "a100"}, "allowed_gpu_types must not be a text"),
        ({"after": "prepare"}, "after must not be a text; give a list of jobs"),
        ({"stop_grace": 90}, "stop_grace must be a timedelta"),
        ({"deadline": None}, "deadline must be a datetime with a time zone, or a timedelta"),
        ({"deadline": "6h"}, "deadline must not be a text; give a datetime"),
        ({"secrets": "wandb"}, "secrets must not be a text; give a mapping"),
        ({"env": "A=b"}, "env must not be a text; give a mapping"),
    ],
)
def test_a_field_of_another_type_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        make_job(model="bert", **fields)


def test_contradictory_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_client("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="either"):
            client.submit()
        with pytest.raises(TypeError, match="either"):
            client.submit(jobs_pb2.Job(), model="bert")
        with pytest.raises(ValueError, match="sleeping"):
            client.list_jobs(["sleeping"])
    with pytest.raises(ValueError, match="not both"):
        Client("127.0.0.1:1", token="x", settings=PLAIN_TEXT)
    with pytest.raises(ChannelRefused, match="plain text"):
        Client("server.example:7070", token="x")


def test_address_cluster_and_token_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TESSERA_SERVER", "127.0.0.1:9")
    monkeypatch.setenv("TESSERA_CLUSTER", "lab")
    with Client() as client:
        assert (client.address, client.cluster) == ("127.0.0.1:9", "clusters/lab")
    monkeypatch.setenv("TESSERA_SERVER", "server.example:9")
    monkeypatch.setenv("TESSERA_TOKEN", "secret")
    with pytest.raises(ChannelRefused):  # the token was found, and is not sent in plain text
        Client()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel's files and its dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist"],
        cwd=PROTO,
        check=True,
        capture_output=True,
    )
    site = folder / "site"
    (wheel,) = (folder / "dist").glob("tessera_client-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    libraries = Path(grpc.__file__).parents[1]
    for name in ("grpc", "typing_extensions.py"):  # grpcio, and what it needs
        (site / name).symlink_to(libraries / name)
    (site / "google").mkdir()
    for name in ("protobuf", "_upb"):
        (site / "google" / name).symlink_to(libraries / "google" / name)
    return site


def run_installed(site: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(site)!r}); {code}"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(site)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_brings_names_under_tessera_only_and_its_types(installed: Path) -> None:
    (metadata,) = installed.glob("tessera_client-*.dist-info")
    own = {path.name for path in installed.iterdir()} - {metadata.name}
    assert own == {"tessera", "grpc", "google", "typing_extensions.py"}
    assert not (installed / "tessera" / "__init__.py").exists()  # others share the name
    assert (installed / "tessera" / "client" / "py.typed").is_file()
    assert (installed / "tessera" / "v1" / "py.typed").is_file()


def test_the_client_needs_grpc_and_protobuf_only(installed: Path) -> None:
    project = tomllib.loads((PROTO / "pyproject.toml").read_text())["project"]
    assert [text.partition(">")[0] for text in project["dependencies"]] == ["grpcio", "protobuf"]
    code = (
        "from tessera.client import Client, Unavailable, make_job\n"
        "with Client('127.0.0.1:1', retry_s=0) as client:\n"
        "    try: client.submit(make_job(model='m', batch=1, iterations=1, gpus=1))\n"
        "    except Unavailable as error: print(error.code.name)\n"
        "import sys; print('numpy' in sys.modules)"
    )
    assert run_installed(installed, f"exec({code!r})").split() == ["UNAVAILABLE", "False"]
