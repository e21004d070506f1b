"""The agent's command line, its lease and its patience with servers."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tessera.formulation.errors import InvalidInput, NotAllowed
from tessera.service.agent.backoff import backoff_s
from tessera.service.agent.credentials import EnrolledCredentials, FixedCredentials
from tessera.service.agent.lease import boot_id
from tessera.service.agent.main import main
from tessera.service.agent.settings import build_config, make_parser, parse_node, read_nodes
from tessera.service.agent.state import StateDir
from tessera.service.agent.stream import AgentLease
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import a_gang


def a_state(root: Path) -> StateDir:
    state = StateDir(root, root / "checkpoints")
    state.claim()
    return state


@pytest.mark.parametrize(
    ("text", "rack"), [("n0:a100:8", ""), ("n0:a100:8:r1", "r1"), ("n0:a100:8:row:1", "row:1")]
)
def test_a_node_is_given_as_name_type_and_gpus(text: str, rack: str) -> None:
    assert parse_node(text) == pb.AgentNode(node="n0", gpu_type="a100", gpus=8, rack=rack)


@pytest.mark.parametrize("text", ["", "n0", "n0:a100", "n0:a100:many", "n0::8", "n0:a100:0"])
def test_an_invalid_node_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="NAME:TYPE:GPUS"):
        parse_node(text)


def test_nodes_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text('[{"node": "n0", "gpu_type": "a100", "gpus": 8}]')
    assert read_nodes(path) == [pb.AgentNode(node="n0", gpu_type="a100", gpus=8)]


def labelled(root: Path, *flags: str) -> list[dict[str, str]]:
    """Return the labels of the two nodes of an agent that is started with ``flags``."""
    path = root / "nodes.json"
    path.write_text(
        '[{"node": "n0", "gpu_type": "a100", "gpus": 8},'
        ' {"node": "n1", "gpu_type": "a100", "gpus": 8, "labels": {"zone": "b"}}]'
    )
    always = ("--server", "127.0.0.1:1", "--cluster", "c", "--data-dir", str(root))
    options = make_parser().parse_args([*always, "--nodes-file", str(path), *flags])
    return [dict(node.labels) for node in build_config(options, "first").hello().nodes]


def test_labels_are_those_of_the_nodes_file_and_then_those_of_all_nodes(tmp_path: Path) -> None:
    assert labelled(tmp_path) == [{}, {"zone": "b"}]
    flags = ("--label", "zone=a", "--label", "disk=ssd")
    assert labelled(tmp_path, *flags) == [
        {"zone": "a", "disk": "ssd"},
        {"zone": "b", "disk": "ssd"},
    ]


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
        labelled(tmp_path, "--label", text)


BAD_LABELS = '[{"node": "n0", "gpu_type": "a100", "gpus": 8, "labels": ["ab"]}]'


@pytest.mark.parametrize("text", ["{", "[1]", "3", '[{"node": "n0"}]', BAD_LABELS])
def test_an_invalid_node_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="must hold a JSON list"):
        read_nodes(path)


@pytest.mark.parametrize(
    "flags",
    [(), ("--node", "n0"), ("--node", "n:t:1", "--lease-s", "0"), ("--nodes-file", "/none")],
)
def test_an_invalid_setting_ends_the_agent_with_status_2(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    always = ("--server", "127.0.0.1:1", "--cluster", "c", "--data-dir", str(tmp_path))
    assert main([*always, *flags]) == 2


def test_the_back_off_doubles_to_a_limit_and_is_repeatable() -> None:
    waits = [backoff_s("seed", attempt, servers=2) for attempt in range(40)]
    assert waits == [backoff_s("seed", attempt, servers=2) for attempt in range(40)]
    for attempt, wait_s in enumerate(waits):
        base_s = min(5.0, 0.1 * 2 ** (attempt // 2))
        assert 0.5 * base_s <= wait_s < 1.5 * base_s
    assert waits != [backoff_s("other", attempt, servers=2) for attempt in range(40)]


def test_a_lease_runs_out_unless_it_is_renewed(tmp_path: Path) -> None:
    now = [100.0]
    lease = AgentLease(a_state(tmp_path), lambda: now[0], 10.0)
    now[0] = 106.0
    assert lease.left_s() == 4.0
    lease.renew(105.0)
    assert lease.left_s() == 9.0
    lease.renew(103.0)  # a late answer to an earlier message
    assert lease.left_s() == 9.0


def test_before_the_first_welcome_there_is_no_lease(tmp_path: Path) -> None:
    assert AgentLease(a_state(tmp_path), lambda: 0.0).left_s() == math.inf


def test_a_restart_does_not_lengthen_the_lease(tmp_path: Path) -> None:
    state, now = a_state(tmp_path), [100.0]
    AgentLease(state, lambda: now[0], 10.0).renew(100.0)
    now[0] = 107.0
    assert AgentLease(state, lambda: now[0]).left_s() == 3.0


def test_a_lease_of_an_earlier_boot_is_ignored(tmp_path: Path) -> None:
    state = a_state(tmp_path)
    state.save_lease(100.0, 10.0, 5.0)
    path = tmp_path / "lease.json"
    path.write_text(path.read_text().replace(boot_id(), "earlier"))
    assert AgentLease(state, lambda: 5.0).left_s() == math.inf


def test_a_data_directory_is_used_by_one_agent_at_a_time(tmp_path: Path) -> None:
    first = a_state(tmp_path)
    with pytest.raises(NotAllowed, match="another agent runs"):
        a_state(tmp_path)
    first.release()
    a_state(tmp_path)


def test_a_gang_that_was_not_stored_completely_is_removed(tmp_path: Path) -> None:
    state = a_state(tmp_path)
    state.add(a_gang("a"))
    (tmp_path / "gangs" / "b@1").mkdir()
    assert list(state.gangs()) == [a_gang("a")]
    assert not (tmp_path / "gangs" / "b@1").exists()


def test_a_job_with_a_slash_in_its_name_stays_in_its_directory(tmp_path: Path) -> None:
    state = a_state(tmp_path)
    assert state.directory(("../../etc", 1)).parent == tmp_path / "gangs"
    assert state.checkpoints("../x").parent == tmp_path / "checkpoints"


def credentials_of(
    root: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, token: str = ""
) -> object:
    monkeypatch.setenv("TESSERA_CA", "")
    if token:
        monkeypatch.setenv("TESSERA_JOIN_TOKEN", token)
    always = (
        "--server",
        "127.0.0.1:1",
        "--cluster",
        "c",
        "--data-dir",
        str(root),
        "--node",
        "n:t:1",
    )
    options = make_parser().parse_args([*always, *flags])
    return build_config(options, "first").credentials


def test_a_join_token_is_only_sent_to_servers_of_a_trusted_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=r"--ca.*secrets are only sent"):
        credentials_of(tmp_path, monkeypatch, "--join-token-file", "t")
    with pytest.raises(InvalidInput, match=r"--ca.*secrets are only sent"):
        credentials_of(tmp_path, monkeypatch, "--certificate", "c", "--key", "k")
    with pytest.raises(InvalidInput, match=r"--ca.*secrets are only sent"):
        credentials_of(tmp_path, monkeypatch, token="secret")


def test_the_join_token_does_not_reach_the_processes_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = credentials_of(tmp_path, monkeypatch, "--ca", "ca.pem", token="secret")
    assert isinstance(found, EnrolledCredentials)
    assert "TESSERA_JOIN_TOKEN" not in os.environ


def test_without_an_authority_and_a_token_an_agent_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert credentials_of(tmp_path, monkeypatch) == FixedCredentials()
