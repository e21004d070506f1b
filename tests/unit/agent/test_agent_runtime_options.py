"""The agents that run programs: in real time, over TLS or with a server on the same machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessera.formulation.errors import InvalidInput, NotAllowed
from tessera.formulation.exit_reasons import ExitReason
from tessera.formulation.runtimes import COMMAND, PROFILER, REPLAY, RUNTIMES
from tessera.service.agent.credentials import FixedCredentials
from tessera.service.agent.isolation import UnfitNode, UnsuitableNode, UserRule
from tessera.service.agent.local_gangs import failed_member
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


@pytest.mark.parametrize("option", ["--run-as", "--allow-user"])
def test_an_agent_does_not_start_if_the_users_of_programs_cannot_run_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # only root has other users than its own
    shut, data = tmp_path / "shut", tmp_path / "shut" / "data"
    shut.mkdir(mode=0o700)
    with pytest.raises(UnfitNode, match=r"nobody cannot enter .*; run `chmod o.x"):
        runtimes_of(data, ("127.0.0.1:50051",), f"{option}=nobody")
    with pytest.raises(UnsuitableNode, match="no-such-user does not exist on this node"):
        runtimes_of(data, ("127.0.0.1:50051",), f"{option}=no-such-user")
    assert not data.exists()
    assert runtimes_of(data, ("127.0.0.1:50051",), f"{option}=root").keys() == RUNTIMES.keys()


REASONS: dict[ExitReason, Exception] = {
    ExitReason.REFUSED: InvalidInput("command", "must name one program"),
    ExitReason.NOT_STARTED: UnsuitableNode("launch.user", "does not exist on this node"),
    ExitReason.NODE_UNFIT: UnfitNode("--run-as", "cannot enter /data"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_wrong_with_a_job_is_told_from_what_its_node_lacks(reason: ExitReason) -> None:
    member = failed_member("n0", REASONS[reason])
    assert (member.reason, member.error) == (reason, str(REASONS[reason]))
    assert reason.is_final is (reason is ExitReason.REFUSED)


def test_an_error_of_the_system_is_the_nodes(tmp_path: Path) -> None:
    for error in (OSError(28, "No space left on device"), PermissionError(13, "denied")):
        assert failed_member("n0", error).reason is ExitReason.NODE_UNFIT
    assert failed_member("n0", NotAllowed("not now")).reason is ExitReason.NOT_STARTED


def test_an_agent_of_root_without_any_user_for_programs_is_unfit_and_not_each_of_its_jobs() -> None:
    with pytest.raises(UnfitNode, match="start it with --run-as USER"):
        UserRule().choose("", own_uid=0)
    with pytest.raises(UnsuitableNode) as refused:
        UserRule(allowed=("nobody",)).choose("", own_uid=0)
    assert not isinstance(refused.value, UnfitNode)
