"""Rounds, policies, certificates and replays on the command line, against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.formulation.answer.codec import decode
from tessera.formulation.answer.solution import Solution
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds import deciding
from tests.support.command_line import Tessera, read, submit
from tests.support.proving import ProvingSolver, certify_falsely, certify_prices, only_say

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "verify_certificate.py"

Prove = Callable[[Problem, Solution], Solution]
Decide = Callable[..., None]


def test_a_round_is_replayed_as_recorded_and_with_another_solver(
    tessera: Tessera, fleet: Fleet, tmp_path: Path
) -> None:
    for name in ("one", "two", "three"):
        submit(tessera, name)
    tessera("round", "--deadline", "30s")
    assert read(tessera, "replay", "1")["same_decisions"]
    assert tessera("replay", "1", "-o", "name").stdout == "clusters/c/rounds/1\n"
    head, solver, *_ = tessera("replay", "1", "--solver", "greedy").stdout.splitlines()
    assert head.split() == ["RECORDED", "REPLAYED"]
    assert solver.split() == ["solver", "portfolio", "greedy"]
    assert [r["name"] for r in read(tessera, "rounds")["rounds"]] == ["clusters/c/rounds/1"]
    file = tmp_path / "round.json"
    tessera("replay", "1", "--save-snapshot", str(file))
    assert isinstance(decode(file.read_bytes()), Snapshot)
    solved = read(tessera, "solve", str(file), "--solver", "cp-sat")
    recorded = read(tessera, "round", "show", "1")
    for fact in ("objective", "snapshot_digest"):
        assert solved[fact] == recorded[fact]
    shown = tessera("solve", str(file), "--objective", "max-min within 5% then throughput").stdout
    assert "max-min within 5% then throughput" in shown
    assert "nothing was committed" in shown
    file.write_text("{}")
    assert "not a saved snapshot" in tessera("solve", str(file), code=2).stderr
    tessera("replay", "7", code=4)
    tessera("round", "--solver", "magic", code=1)


def test_a_round_shows_its_goals_promises_and_policy(tessera: Tessera, fleet: Fleet) -> None:
    submit(tessera, "easy", "--deadline", "30d")
    submit(tessera, "never", "--deadline", "60s")
    policy = ["--objective", "deadline then jct", "--no-keep-requests", "--max-changes", "20"]
    shown = tessera("round", *policy).stdout
    assert "deadline then jct; keep requests no; maximum changes 20" in shown
    assert "1 promised" in shown
    rows = [line.split() for line in tessera("round", "show", "1").stdout.splitlines()]
    goals = [row[0] for row in rows if row[0] in ("deadline", "jct") and "%" in row]
    assert goals == ["deadline", "jct"]
    easy = tessera("job", "easy").stdout
    assert "promised (schedule below)" in easy
    # The number of GPUs depends on where the slots lie now.
    assert " x a100, pp 2" in easy.splitlines()[-1]
    assert "refused; the earliest that could be met is 20" in tessera("job", "never").stdout
    assert "all decisions are the same" in tessera("replay", "1").stderr
    changed = tessera("replay", "1", "--objective", "jct", "--keep-requests")
    assert "REPLAYED" in changed.stdout


def test_a_policy_is_set_shown_listed_and_restored(tessera: Tessera) -> None:
    assert "0 (the server's settings)" in tessera("policy", "show").stdout
    assert "no policy was set" in tessera("policy", "history").stderr
    done = tessera(
        "policy", "set", "--objective", "jct", "--set", "default_run=2h", "-m", "shorter waits"
    )
    assert "version 1 is in force from the next round on" in done.stderr
    # Options that are not given stay as they are.
    tessera("policy", "set", "--max-changes", "3")
    assert "jct; default run 2h; maximum changes 3" in tessera("policy", "show").stdout
    tessera("policy", "set", "--from-defaults", "--objective", "throughput")
    assert "default run" not in tessera("policy", "show").stdout
    listed = read(tessera, "policy", "history")["policies"]
    assert [policy["version"] for policy in listed] == ["3", "2", "1"]
    assert listed[-1]["message"] == "shorter waits"
    tessera("policy", "restore", "1")
    assert "restores version 1" in tessera("policy", "show").stdout
    decided = read(tessera, "round")
    assert (decided["options"]["objective"], decided["policy_version"]) == ("jct", "4")
    assert "(policy version 4)" in tessera("round", "show", "1").stdout
    assert "names no option to set" in tessera("policy", "set", code=2).stderr
    assert "policies/9" in tessera("policy", "show", "9", code=4).stderr
    valid = tessera("policy", "set", "--objective", "makespan", "--validate-only")
    assert "nothing changed" in valid.stderr
    assert read(tessera, "policy", "show")["version"] == "4"


@pytest.fixture
def decide(tessera: Tessera, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Decide:
    """Return a function that commits a round of three jobs, of which two fit."""

    def run(prove: Prove, objective: str = "throughput") -> None:
        monkeypatch.setattr(deciding, "make_solver", lambda _name="": ProvingSolver(prove))
        for name in ("one", "two", "three"):
            submit(tessera, name)
        tessera("round", "--objective", objective)

    return run


def test_anyone_can_check_a_round_with_a_certificate(tessera: Tessera, decide: Decide) -> None:
    decide(certify_prices)
    checked = tessera("certificate", "verify", "1").stdout
    assert "throughput: no answer is worth more than" in checked
    assert "by prices, which were checked in integers" in checked
    (goal,) = read(tessera, "certificate", "verify", "1")["goals"]
    assert goal["goal"]["certified"]
    assert goal["proven"] <= goal["goal"]["bound"]
    exported = tessera("certificate", "export", "1").stdout
    command = [sys.executable, "-I", "-S", str(SCRIPT)]
    run = subprocess.run(command, input=exported, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("throughput: worth ")
    document = json.loads(exported)
    assert document["round"] == "clusters/c/rounds/1"
    # The two that start are identical. The start of the third is planned for later.
    assert [group["jobs"] for group in document["goals"][0]["classes"]] == [2, 1]
    shown = read(tessera, "round", "show", "1")
    assert (shown["proved_by"], shown["has_certificate"]) == ("prices", True)
    assert "prices, certified" in tessera("round", "show", "1").stdout
    assert "PROVED BY" in tessera("rounds", "-o", "wide").stdout
    tessera("certificate", "verify", "7", code=4)


def test_each_goal_says_what_proves_it(tessera: Tessera, decide: Decide) -> None:
    decide(certify_prices, "max-min then throughput")
    checked = tessera("certificate", "verify", "1").stdout
    assert "max-min: the bound is not certified; it is by a search over levels" in checked
    document = json.loads(tessera("certificate", "export", "1").stdout)
    assert document["not_certified"] == [{"name": "max-min", "proved_by": "levels"}]
    assert [goal["name"] for goal in document["goals"]] == ["throughput"]


@pytest.mark.parametrize(
    ("prove", "checked"),
    [
        (only_say, "the bound is not certified; it is by the word of CP-SAT"),
        (certify_falsely, "the certificate is not a proof of this round: it proves"),
    ],
)
def test_a_round_that_is_not_proven_is_found(
    tessera: Tessera, decide: Decide, prove: Prove, checked: str
) -> None:
    decide(prove)
    failed = tessera("certificate", "verify", "1", code=1)
    assert checked in failed.stdout
    refused = tessera("certificate", "export", "1", code=1)
    assert refused.stdout == ""
    if prove is only_say:
        assert "clusters/c/rounds/1 is not certified" in failed.stderr
        assert "the word of CP-SAT" in refused.stderr
        assert "the word of CP-SAT, not certified" in tessera("round", "show", "1").stdout
