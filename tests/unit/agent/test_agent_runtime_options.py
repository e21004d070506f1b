"""The agents that run programs: in real time, over TLS or with a server on the same machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.runtimes import COMMAND, PROFILER, REPLAY, RUNTIMES
from tessera.service.agent.credentials import FixedCredentials
from tessera.service.agent.runtimes.options import make_runtimes
from tessera.service.agent.runtimes.programs import ProgramRuntime
from tessera.service.agent.runtimes.protocol import Runtime
from tessera.service.agent.settings import make_parser

FAR = "scheduler.lab:50051"
NOT_ENCRYPTED = "this agent's connection to the server is not encrypted"


def runtimes_of(tmp_path: Path, servers: tuple[str, ...], *flags: str) -> dict[str, Runtime]:
    """Return the runtimes of an agent with these servers and options."""
    words = ["--cluster", "c", "--node", "n0:a100:2", "--data-dir", str(tmp_path), *flags]
    words += [word for server in servers for word in ("--server", server)]
    options = make_parser().parse_args(words)
    return make_runtimes(
        options,
        servers=servers,
        cluster="c",
        nodes={"n0": 2},
        credentials=FixedCredentials(),
        grace_s=30.0,
    )


def refusal_of(runtimes: dict[str, Runtime]) -> str:
    """Return why programs are refused, or ""."""
    runtime = runtimes[COMMAND]
    assert isinstance(runtime, ProgramRuntime)
    return runtime.settings.refusal


@pytest.mark.parametrize(
    "servers",
    [
        ("127.0.0.1:50051",),
        ("localhost:50051",),
        ("[::1]:50051",),
        ("127.0.0.2:50051", "127.0.0.1:50051"),
        ("unix:/run/tessera.sock",),
    ],
)
def test_an_agent_on_the_servers_machine_runs_programs_without_encryption(
    tmp_path: Path, servers: tuple[str, ...]
) -> None:
    assert refusal_of(runtimes_of(tmp_path, servers)) == ""


@pytest.mark.parametrize(
    "servers", [(FAR,), ("10.0.0.5:50051",), ("0.0.0.0:50051",), ("127.0.0.1:50051", FAR)]
)
def test_an_agent_elsewhere_needs_encryption_for_programs_and_replays_without(
    tmp_path: Path, servers: tuple[str, ...]
) -> None:
    runtimes = runtimes_of(tmp_path, servers)
    assert refusal_of(runtimes).startswith(NOT_ENCRYPTED)
    assert "start the agent with --ca and a join token" in refusal_of(runtimes)
    assert runtimes.keys() == RUNTIMES.keys()
    assert not isinstance(runtimes[REPLAY], ProgramRuntime)
    assert not isinstance(runtimes[PROFILER], ProgramRuntime)
    assert refusal_of(runtimes_of(tmp_path, servers, "--ca", "ca.pem")) == ""


def test_an_agent_with_a_clock_factor_runs_no_programs(tmp_path: Path) -> None:
    runtimes = runtimes_of(tmp_path, ("localhost:50051",), "--clock-factor", "100")
    assert "replays jobs 100 times as fast" in refusal_of(runtimes)


def test_too_short_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--log-mib"):
        runtimes_of(tmp_path, ("localhost:50051",), "--log-mib", "0")
