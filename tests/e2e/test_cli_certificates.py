"""Certificates of rounds on the command line: checked, exported, and refused if they are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution
from tessera.service import deciding
from tests.support.command_line import Tessera, read, submit
from tests.support.proving import ProvingSolver, certify_falsely, certify_prices, only_say

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "verify_certificate.py"

Prove = Callable[[Problem, Solution], Solution]


@pytest.fixture
def decide(
    tessera: Tessera, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Prove, str], None]:
    """Return a function that commits a round of three jobs, of which two fit."""

    def run(prove: Prove, objective: str = "throughput") -> None:
        monkeypatch.setattr(deciding, "make_solver", lambda _name="": ProvingSolver(prove))
        for name in ("one", "two", "three"):
            submit(tessera, name)
        tessera("round", "--objective", objective)

    return run


def test_anyone_can_check_a_round_with_a_certificate(
    tessera: Tessera, decide: Callable[..., None]
) -> None:
    decide(certify_prices)
    checked = tessera("certificate", "verify", "1").stdout
    assert "throughput: no answer is worth more than" in checked
    assert "by prices, which were checked in integers" in checked
    (goal,) = read(tessera, "certificate", "verify", "1")["goals"]
    assert goal["goal"]["certified"]
    assert goal["proven"] <= goal["goal"]["bound"]
    document = tessera("certificate", "export", "1").stdout
    command = [sys.executable, "-I", "-S", str(SCRIPT)]
    run = subprocess.run(command, input=document, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("throughput: worth ")
    assert json.loads(document)["round"] == "clusters/c/rounds/1"
    assert json.loads(document)["goals"][0]["classes"][0]["jobs"] == 3  # they are identical
    shown = read(tessera, "round", "show", "1")
    assert (shown["proved_by"], shown["has_certificate"]) == ("prices", True)
    assert "prices, certified" in tessera("round", "show", "1").stdout
    assert "PROVED BY" in tessera("rounds", "-o", "wide").stdout


def test_each_goal_says_what_proves_it(tessera: Tessera, decide: Callable[..., None]) -> None:
    decide(certify_prices, "max-min then throughput")
    checked = tessera("certificate", "verify", "1").stdout
    assert "max-min: the bound is not certified; it is by a search over levels" in checked
    assert "throughput: no answer is worth more than" in checked
    document = json.loads(tessera("certificate", "export", "1").stdout)
    assert document["not_certified"] == [{"name": "max-min", "proved_by": "levels"}]
    assert [goal["name"] for goal in document["goals"]] == ["throughput"]


def test_a_bound_by_the_word_of_cp_sat_says_so(
    tessera: Tessera, decide: Callable[..., None]
) -> None:
    decide(only_say)
    failed = tessera("certificate", "verify", "1", code=1)
    assert "the bound is not certified; it is by the word of CP-SAT" in failed.stdout
    assert "clusters/c/rounds/1 is not certified" in failed.stderr
    refused = tessera("certificate", "export", "1", code=1)
    assert (refused.stdout, "the word of CP-SAT" in refused.stderr) == ("", True)
    assert "the word of CP-SAT, not certified" in tessera("round", "show", "1").stdout


def test_a_false_certificate_is_found(tessera: Tessera, decide: Callable[..., None]) -> None:
    decide(certify_falsely)
    failed = tessera("certificate", "verify", "1", code=1)
    assert "the certificate is not a proof of this round: it proves" in failed.stdout
    tessera("certificate", "export", "1", code=1)


def test_a_round_that_does_not_exist_is_not_found(tessera: Tessera) -> None:
    tessera("certificate", "verify", "7", code=4)
