"""The command line with a server for each test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tessera.benchmarks.service.fleet import Fleet
from tessera.db.schema.engine import Database
from tessera.formulation.records.clusters import NodeSpec
from tessera.service.cli.main import app
from tessera.service.server.settings.config import Config
from tessera.service.server.wiring import run_server
from tests.support.patience import PATIENCE_S

CLUSTER = """\
gpu_types: {a100: 40GiB}
nodes: [{name: "n{}", count: 2, gpu_type: a100, gpus: 4, rack: r0}]
"""


PROFILES = """\
model,params,global_batch,gpu_type,num_nodes,gpus_per_node,iter_time_s,status,pipeline_degree
bert,1.3B,256,a100,1,4,2.0,ok,2
bert,1.3B,256,a100,2,4,1.0,ok,2
bert,1.3B,256,a100,1,1,,oom,1
"""


TRACE = """\
job_id,submit_time_s,model,params,global_batch,num_iterations,num_gpus,deadline_s
t1,0,bert,1.3B,256,5000,4,
t2,10,bert,1.3B,256,5000,4,3610
t3,20,bert,1.3B,256,5000,4,
"""


NODES = [NodeSpec(name=f"n{i}", gpu_type="a100", gpus=4, rack="r0") for i in range(2)]


Tessera = Callable[..., Result]


@pytest.fixture
def address(database: Database, request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a server on the test's own database, on an event loop in a separate thread.

    A test that parametrizes this fixture indirectly gives changes of the server's settings.
    """
    settings: dict[str, Any] = {
        "period_s": 0.0,
        "grace_s": 1.0,
        "store_threads": 2,
        "round_threads": 1,
        **getattr(request, "param", {}),
    }
    config = Config(listen="127.0.0.1:0", database_url=database.url, **settings)
    loop, stop, ports = asyncio.new_event_loop(), asyncio.Event(), []
    started = threading.Event()

    async def serve() -> None:
        async with run_server(config) as port:
            ports.append(port)
            started.set()
            await stop.wait()

    def work() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(PATIENCE_S)
    try:
        yield f"127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)


@pytest.fixture
def tessera(address: str, tmp_path: Path) -> Tessera:
    """Return a function that runs the command line against the server, which has a cluster."""

    def run(*arguments: str, code: int = 0, stdin: str | None = None) -> Result:
        env = {"TESSERA_SERVER": address, "TESSERA_CLUSTER": "c"}
        done = CliRunner().invoke(app, arguments, env=env, input=stdin)
        assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
        return done

    run("cluster", "apply", "-f", "-", stdin=CLUSTER)
    profiles = tmp_path / "profiles.csv"
    profiles.write_text(PROFILES)
    run("import", "profiles", str(profiles))
    return run


@pytest.fixture
def fleet(address: str, tessera: Tessera) -> Iterator[Fleet]:
    """Run an agent for all nodes of the cluster."""
    with Fleet(address, "c", NODES, "fleet") as fleet:
        yield fleet


def read(tessera: Tessera, *arguments: str) -> Any:
    """Return the JSON that a command prints to stdout, which must contain nothing else."""
    return json.loads(tessera(*arguments, "-o", "json").stdout)


def submit(tessera: Tessera, name: str, *more: str) -> None:
    """Submit a job of 4 GPUs. Options in ``more`` have precedence."""
    usual = "--model bert --params 1.3B --batch 256 --iterations 1000 --gpus 4"
    tessera("submit", name, *usual.split(), *more)
