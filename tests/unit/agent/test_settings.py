"""The agent's command line: its nodes, its certificate, its runtimes and their users, its patience."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessera.formulation.base.errors import InvalidInput, NotAllowed
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.runtimes import COMMAND, PROFILER, REPLAY, RUNTIMES
from tessera.service.agent.backoff import backoff_s
from tessera.service.agent.credentials import EnrolledCredentials, FixedCredentials
from tessera.service.agent.isolation import UnfitNode, UnsuitableNode, UserRule
from tessera.service.agent.local_gangs import failed_member
from tessera.service.agent.main import main
from tessera.service.agent.runtimes.options import make_runtimes
from tessera.service.agent.runtimes.programs import ProgramRuntime
from tessera.service.agent.runtimes.protocol import Runtime
from tessera.service.agent.settings import build_config, make_parser, parse_node, read_nodes
from tessera.v1 import agents_pb2 as pb

ALWAYS = ("--server", "127.0.0.1:1", "--cluster", "c")
NODE = '{"node": "n0", "gpu_type": "a100", "gpus": 8}'


@pytest.mark.parametrize(
    ("text", "rack"), [("n0:a100:8", ""), ("n0:a100:8:r1", "r1"), ("n0:a100:8:row:1", "row:1")]
)
def test_a_node_is_given_as_name_type_and_gpus(text: str, rack: str) -> None:
    assert parse_node(text) == pb.AgentNode(node="n0", gpu_type="a100", gpus=8, rack=rack)


@pytest.mark.parametrize("text", ["", "n0", "n0:a100", "n0:a100:many", "n0::8", "n0:a100:0"])
def test_an_invalid_node_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="NAME:TYPE:GPUS"):
        parse_node(text)


def nodes_of(root: Path, *flags: str) -> list[pb.AgentNode]:
    """Return the two nodes of an agent that is started with ``flags``."""
    path, second = root / "nodes.json", NODE.replace("n0", "n1")
    path.write_text(f'[{NODE}, {second[:-1]}, "labels": {{"zone": "b"}}}}]')
    options = make_parser().parse_args(
        [*ALWAYS, "--data-dir", str(root), "--nodes-file", str(path), *flags]
    )
    return list(build_config(options, "first").hello().nodes)


def test_nodes_have_the_labels_of_their_file_and_then_those_of_all_nodes(tmp_path: Path) -> None:
    first = pb.AgentNode(node="n0", gpu_type="a100", gpus=8)
    second = pb.AgentNode(node="n1", gpu_type="a100", gpus=8, labels={"zone": "b"})
    assert nodes_of(tmp_path) == [first, second]
    labels = [node.labels for node in nodes_of(tmp_path, "--label=zone=a", "--label=disk=ssd")]
    assert labels == [{"zone": "a", "disk": "ssd"}, {"zone": "b", "disk": "ssd"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zone", "--label: expected KEY=VALUE, not 'zone'"),
        ("zone=", r"--label\[zone\]: has '', but a key or value must be 1 to 63 letters"),
        ("a b=c", "--label: has 'a b', but a key or value"),
    ],
)
def test_a_bad_label_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        nodes_of(tmp_path, "--label", text)


@pytest.mark.parametrize(
    "text", ["{", "[1]", "3", '[{"node": "n0"}]', f'[{NODE[:-1]}, "labels": ["ab"]}}]']
)
def test_an_invalid_node_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="must hold a JSON list"):
        read_nodes(path)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--node", "n0"),
        ("--node", "n:t:1", "--lease-s", "0"),
        ("--nodes-file", "/none"),
        ("--node", "n:t:1", "--network-backend", "tc"),
        ("--node", "n:t:1", "--measure-traffic", "-1"),
        ("--node", "n:t:1", "--measure-traffic", "0.2"),
        ("--node", "n:t:1", "--measure-traffic", "nan"),
        ("--node", "n:t:1", "--measure-traffic", "30", "--node", "m:t:1"),
        ("--node", "n:t:1", "--measure-traffic", "30", "--netns", "blue"),
        ("--node", "n:t:1", "--measure-traffic", "30", "--interface", "nosuch0"),
    ],
)
def test_an_invalid_setting_ends_the_agent_with_status_2(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    assert main([*ALWAYS, "--data-dir", str(tmp_path), *flags]) == 2


def test_the_back_off_doubles_to_a_limit_and_is_repeatable() -> None:
    waits = [backoff_s("seed", attempt, servers=2) for attempt in range(40)]
    assert waits == [backoff_s("seed", attempt, servers=2) for attempt in range(40)]
    for attempt, wait_s in enumerate(waits):
        base_s = min(5.0, 0.1 * 2 ** (attempt // 2))
        assert 0.5 * base_s <= wait_s < 1.5 * base_s
    assert waits != [backoff_s("other", attempt, servers=2) for attempt in range(40)]


def credentials_of(
    root: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, token: str = ""
) -> object:
    monkeypatch.setenv("TESSERA_CA", "")
    if token:
        monkeypatch.setenv("TESSERA_JOIN_TOKEN", token)
    options = make_parser().parse_args(
        [*ALWAYS, "--data-dir", str(root), "--node", "n:t:1", *flags]
    )
    return build_config(options, "first").credentials


@pytest.mark.parametrize(
    ("flags", "token"),
    [
        (("--join-token-file", "t"), ""),
        (("--certificate", "c", "--key", "k"), ""),
        ((), "secret"),
    ],
)
def test_a_join_token_is_only_sent_to_servers_of_a_trusted_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], token: str
) -> None:
    with pytest.raises(InvalidInput, match=r"--ca.*secrets are only sent"):
        credentials_of(tmp_path, monkeypatch, *flags, token=token)


def test_the_join_token_does_not_reach_the_processes_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert credentials_of(tmp_path, monkeypatch) == FixedCredentials()
    credentials = credentials_of(tmp_path, monkeypatch, "--ca", "ca.pem", token="secret")
    assert isinstance(credentials, EnrolledCredentials)
    assert "TESSERA_JOIN_TOKEN" not in os.environ


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


def test_jobs_may_name_only_users_that_the_agent_allows() -> None:
    rule = UserRule(default="nobody", allowed=("daemon",))
    assert rule.choose("", 0).name == "nobody"
    assert rule.choose("daemon", 0).name == "daemon"
    with pytest.raises(InvalidInput, match="must not be root on this node"):
        rule.choose("root", 0)
    with pytest.raises(InvalidInput, match="start the agent as root"):
        rule.choose("daemon", 65534)
    with pytest.raises(UnfitNode, match="start it with --run-as USER"):
        UserRule().choose("", 0)
    with pytest.raises(UnsuitableNode) as refused:  # another job may name its user
        UserRule(allowed=("nobody",)).choose("", 0)
    assert not isinstance(refused.value, UnfitNode)
