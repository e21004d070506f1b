"""A job of a model that nobody knows, from the command line to a real agent's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent_server import AgentProcess
from tests.support.command_line import Tessera, address, read, tessera
from tests.support.waiting import until

__all__ = ["address", "tessera"]


@pytest.fixture
def agent(tessera: Tessera, address: str, tmp_path: Path) -> Iterator[AgentProcess]:
    flags = ("--clock-factor", "100", "--inspect-s", "0.1", "--heartbeat-s", "0.5")
    nodes = [f"n{i}:a100:4:r0" for i in range(2)]
    process = AgentProcess(tmp_path / "agent", [int(address.split(":")[1])], *flags, nodes=nodes)
    process.start()
    yield process
    process.clean()


def submit_sphinx(tessera: Tessera, name: str, *more: str) -> None:
    workload = ("--model", "sphinx", "--params", "9B", "--batch", "8")
    tessera("submit", name, *workload, "--iterations", "1000000000", "--gpus", "4", *more)


@pytest.mark.usefixtures("agent")
def test_a_job_of_a_model_that_nobody_knows_runs_as_requested_and_is_not_measured_by_replay(
    tessera: Tessera,
) -> None:
    submit_sphinx(tessera, "s", "--gpu-type", "a100", "--restart", "1s")
    submit_sphinx(tessera, "any")

    def starts() -> bool:
        tessera("round")
        return bool(read(tessera, "job", "s")["state"] != "QUEUED")

    until(starts, "the server finds that it knows no such model, and a round starts the job")
    until(lambda: read(tessera, "job", "s")["state"] == "RUNNING", "the job runs")
    job = read(tessera, "job", "s")
    cell = job["allocation"]["cell"]
    assert (cell["gpu_type"], cell["gpus"], cell["plan"]) == ("a100", 4, "")
    assert job["allocation"]["rate"] == 0.0
    assert "4 x a100, unknown rate" in tessera("jobs").stdout
    assert read(tessera, "job", "any")["reason"]["code"] == "NO_ESTIMATE"

    until(
        lambda: read(tessera, "job", "s")["allocation"]["iter_time_s"] > 0, "its time is reported"
    )
    assert read(tessera, "job", "s")["allocation"]["iter_time_source"] == "REPLAYED"
    shown = " ".join(tessera("job", "s").stdout.split())
    assert "1 s, replayed: nothing is trained" in shown
    model = ("--model", "sphinx/9B", "--batch", "8")
    assert read(tessera, "cells", *model).get("cells", []) == []
    tessera("round")
    again = read(tessera, "job", "s")
    assert (again["generation"], again["allocation"]["rate"]) == (job["generation"], 0.0)
