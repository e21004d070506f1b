"""The script that users check certificates with agrees with our checker, and needs only Python."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.formulation.certificate_document import certificate_document
from tessera.formulation.certificates import Certificate, PriceLeaf
from tessera.formulation.errors import InvalidCertificate
from tessera.formulation.problem import Problem
from tests.support.problems import a_problem
from tests.support.proofs import (
    a_random_certificate,
    a_random_problem,
    best_choice,
    proves,
    read_document,
    tampered,
)

SCRIPT = Path(__file__).parents[3] / "docs" / "examples" / "verify_certificate.py"
TAMPERED = 60


def run_script(*goals: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the script in a Python without any packages."""
    command = [sys.executable, "-I", "-S", str(SCRIPT)]
    text = json.dumps({"goals": goals})
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, check=False
    )


def a_goal(problem: Problem, certificate: Certificate, name: str = "goal") -> dict[str, Any]:
    choice = best_choice(problem)
    assert choice is not None
    return certificate_document(problem, certificate, choice, name=name, bound=certificate.bound)


def random_goals(count: int, first: int = 0) -> list[tuple[int, Problem, Certificate]]:
    goals = []
    for seed in range(first, first + 3 * count):
        problem = a_random_problem(seed)
        if best_choice(problem) is not None:
            goals.append((seed, problem, a_random_certificate(problem, seed)))
    assert len(goals) >= count
    return goals[:count]


def test_the_script_has_at_most_80_lines_and_imports_only_the_standard_library() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 80
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) == {"json", "sys"}


def test_the_script_proves_what_our_checker_proves() -> None:
    cases = random_goals(300)
    goals = [a_goal(problem, proof, f"goal {seed}") for seed, problem, proof in cases]
    run = run_script(*goals)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(cases)
    for line, goal, (seed, _, proof) in zip(lines, goals, cases, strict=True):
        proven = re.fullmatch(
            rf"goal {seed}: worth (-?\d+), and no answer above (-?\d+), in .*", line
        )
        assert proven is not None, line
        step = int(goal["unit"].split()[0])
        assert int(proven[1]) == goal["objective"]
        assert int(proven[2]) * step == proof.bound


def test_the_script_and_our_checker_agree_on_tampered_certificates() -> None:
    refused = 0
    for seed, problem, proof in random_goals(TAMPERED, first=5000):
        changed = tampered(problem, proof, seed)
        try:
            goal = a_goal(problem, changed)
        except InvalidCertificate:
            continue  # it is not even one of this problem
        run = run_script(goal)
        proven = proves(*read_document(goal))
        assert (run.returncode == 0) == (proven is not None), (seed, run.stderr)
        refused += proven is None
    assert refused > TAMPERED / 10


def test_the_script_never_accepts_a_document_with_a_false_bound() -> None:
    refused = 0
    draw = np.random.default_rng(1)
    for seed, problem, proof in random_goals(TAMPERED, first=9000):
        goal = a_goal(problem, proof)
        truth = goal["objective"]
        change_one_number(goal, draw)
        run = run_script(goal)
        refused += run.returncode != 0
        assert run.returncode == 0 or run.stderr, seed
        if run.returncode == 0:
            assert goal["bound"] >= truth, seed
    assert refused > TAMPERED / 10


def change_one_number(goal: dict[str, Any], draw: np.random.Generator) -> None:
    """Change a number of the proof: not of the rows, classes or values, which state the problem."""
    places: list[tuple[Any, Any]] = [(goal, "bound"), (goal, "denominator")]
    parts: list[Any] = [goal["nodes"]]
    while parts:
        part = parts.pop()
        for key in part if isinstance(part, dict) else range(len(part)):
            (places if isinstance(part[key], int) else parts).append(
                (part, key) if isinstance(part[key], int) else part[key]
            )
    owner, key = places[int(draw.integers(len(places)))]
    owner[key] += int(draw.choice([-7, -1, 1, 2, 100]))


@pytest.mark.parametrize("change", ["objective", "count", "room"])
def test_the_script_checks_the_answer(change: str) -> None:
    problem = a_problem([[(4, {0: 4})], [(4, {0: 4})], [(3, {0: 3})]], [8])
    goal = a_goal(problem, Certificate(bound=8, denominator=1, root=PriceLeaf(prices=((0, 1),))))
    assert run_script(goal).returncode == 0
    wrong = copy.deepcopy(goal)
    if change == "objective":
        wrong["objective"] += 1
    elif change == "count":
        wrong["classes"][0]["columns"][0][2] = 3
    else:
        wrong["rows"][0]["room"] = 7
    run = run_script(wrong)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("not proven: ")


def test_the_script_refuses_other_versions() -> None:
    problem = a_problem([[(4, {0: 4})]])
    goal = a_goal(problem, Certificate(bound=4, denominator=1, root=PriceLeaf(prices=())))
    assert "another version" in run_script({**goal, "version": 2}).stderr
