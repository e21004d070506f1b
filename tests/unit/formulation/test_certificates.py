"""Our checker of certificates and the script for users never accept a bound below the optimum."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.certificate_check import check_certificate
from tessera.formulation.answer.certificate_document import certificate_document
from tessera.formulation.answer.certificates import (
    Branch,
    Certificate,
    CertificateNode,
    PriceLeaf,
    certificate_from_plain,
    certificate_to_plain,
)
from tessera.formulation.base.errors import InvalidCertificate, InvalidInput
from tessera.formulation.round.problem import Problem
from tests.support.problems import a_problem
from tests.support.proofs import (
    ANY_BOUND,
    a_random_certificate,
    a_random_problem,
    best_choice,
    best_objective,
    proves,
    read_document,
    spelled_columns,
    tampered,
)

SEEDS = range(400)

TOO_DEEP = 2 * sys.getrecursionlimit()
"""Levels of a tree that a recursive function could not follow."""


def a_proof(root: CertificateNode, *, bound: int = ANY_BOUND, denominator: int = 1) -> Certificate:
    return Certificate(bound=bound, denominator=denominator, root=root)


def test_no_certificate_proves_less_than_the_optimum() -> None:
    informative = 0
    for seed in SEEDS:
        problem = a_random_problem(seed)
        best = best_objective(problem)
        if best is None:
            continue  # every bound holds for a problem without an answer
        for again in range(3):
            certificate = a_random_certificate(problem, seed + 1000 * again)
            assert certificate.bound >= best, seed
            informative += certificate.bound < sum(
                max([0, *(value for _, value, _ in options)])
                for options in spelled_columns(problem)
            )
    assert informative > 50  # many of them say more than that every job has the cluster alone


def test_a_tampered_certificate_is_refused_or_proves_only_what_is_true() -> None:
    refused = 0
    for seed in SEEDS:
        problem = a_random_problem(seed)
        best = best_objective(problem)
        if best is None:
            continue
        proven = proves(problem, tampered(problem, a_random_certificate(problem, seed), seed))
        refused += proven is None
        assert proven is None or proven >= best, seed
    assert refused > 100


def test_prices_prove_the_optimum_of_three_jobs_on_eight_gpus() -> None:
    problem = a_problem([[(40, {0: 4})], [(40, {0: 4})], [(8, {0: 2})]], [8])
    leaf = PriceLeaf(prices=((0, 10),))
    assert check_certificate(problem, a_proof(leaf, bound=80)) == 80
    with pytest.raises(InvalidCertificate, match="proves 80, not the bound 79"):
        check_certificate(problem, a_proof(leaf, bound=79))


def test_prices_are_over_the_denominator_and_the_bound_is_rounded_to_what_values_divide() -> None:
    problem = a_problem([[(6, {0: 2})], [(6, {0: 2})], [(6, {0: 2})]], [5])
    # 6 / 2 = 3 for each GPU: 4 usable GPUs give 12. At 3.5 the bound is 14, and 12 is below it.
    assert check_certificate(problem, a_proof(PriceLeaf(prices=((0, 7),)), denominator=2)) == 12


def test_a_knapsack_proves_what_no_price_can() -> None:
    problem = a_problem([[(30, {0: 3})]] * 4 + [[(11, {0: 1})]], [8])
    priced = min(
        check_certificate(problem, a_proof(PriceLeaf(prices=((0, p),)), denominator=10))
        for p in range(200)
    )
    assert priced == 81
    assert check_certificate(problem, a_proof(PriceLeaf(prices=(), knapsacks=(0,)))) == 71
    assert best_objective(problem) == 71


def test_a_branch_on_the_count_of_a_class_proves_what_no_price_can() -> None:
    problem = a_problem([[(30, {0: 3})]] * 4, [8])
    leaves = (
        PriceLeaf(prices=(), branch_prices=(30,)),
        PriceLeaf(prices=((0, 30),), branch_prices=(60,)),
    )
    tree = Branch(columns=(0,), most=2, below=leaves[0], above=leaves[1])
    assert check_certificate(problem, a_proof(tree, bound=60)) == 60
    with pytest.raises(InvalidCertificate, match="no first job of a class has"):
        check_certificate(problem, a_proof(replace(tree, columns=(1,))))
    with pytest.raises(InvalidCertificate, match="prices of branches"):
        check_certificate(problem, a_proof(tree.below))


def test_waiting_that_uses_rows_is_a_column() -> None:
    job = [(5, {0: 1})]
    problem = replace(
        a_problem([job, job], [1]),
        idle_start=np.array([0, 1, 2]),
        idle_row=np.array([0, 0]),
        idle_amount=np.array([1, 1]),
    )
    # Both jobs use the row in every answer, so a high price shows that there is no answer.
    assert check_certificate(problem, a_proof(PriceLeaf(prices=((0, 100),)))) == 10 - 100
    assert best_objective(problem) is None


def test_a_column_that_does_not_fit_into_the_empty_cluster_counts_for_nothing() -> None:
    problem = a_problem([[(50, {0: 9}), (3, {0: 2})], [(3, {0: 2}), (90, {0: 9})]], [4])
    free = a_proof(PriceLeaf(prices=()))
    assert check_certificate(problem, free) == 6
    above = PriceLeaf(prices=(), branch_prices=(9,))
    tree = Branch(columns=(1,), most=2, below=PriceLeaf(prices=(), branch_prices=(0,)), above=above)
    assert check_certificate(problem, a_proof(tree)) == 6
    choice = np.array([1, 2])
    (kind,) = certificate_document(problem, free, choice, name="", bound=6)["classes"]
    assert (kind["jobs"], kind["columns"]) == (2, [[1, [[0, 1]], 2]])
    with pytest.raises(InvalidInput, match="more of a row than there is"):
        certificate_document(problem, free, np.array([0, 2]), name="", bound=6)


def test_numbers_beyond_64_bits_are_exact() -> None:
    problem = a_problem([[(2**50, {0: 1})], [(2**50 - 1, {0: 1})]], [1])
    denominator = 3**50
    leaf = PriceLeaf(prices=((0, (2**50 - 1) * denominator),))
    assert check_certificate(problem, a_proof(leaf, denominator=denominator)) == 2**50
    knapsack = PriceLeaf(prices=(), knapsacks=(0,), job_prices=((0, 1), (1, 1)))
    assert check_certificate(problem, a_proof(knapsack, denominator=denominator)) == 2**50


def test_a_tree_deeper_than_the_stack_is_checked() -> None:
    problem = a_problem([[(5, {0: 1})]], [1])
    root: CertificateNode = PriceLeaf(prices=(), branch_prices=(0,) * TOO_DEEP)
    for depth in reversed(range(TOO_DEEP)):
        above = PriceLeaf(prices=(), branch_prices=(*(0,) * depth, 9))
        root = Branch(columns=(0,), most=1, below=root, above=above)
    assert check_certificate(problem, a_proof(root, bound=5)) == 5


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (PriceLeaf(prices=((0, -1),)), "a price is negative"),
        (PriceLeaf(prices=((2, 1),)), "priced rows must rise"),
        (PriceLeaf(prices=((1, 1), (0, 1))), "priced rows must rise"),
        (PriceLeaf(prices=(), knapsacks=(0, 1)), "a column uses two knapsacks"),
        (PriceLeaf(prices=(), knapsacks=(0,), job_prices=((0, -1),)), "may wait"),
        (PriceLeaf(prices=(), knapsacks=(0,), job_prices=((1, 1),)), "not the first of its class"),
        (PriceLeaf(prices=(), knapsacks=(0,), job_prices=((0, 1), (0, 1))), "two prices"),
        (PriceLeaf(prices=(), branch_prices=(1,)), "0 branches has 1 prices"),
        (
            Branch(
                columns=(0,),
                most=0,
                below=PriceLeaf(prices=(), branch_prices=(1,)),
                above=PriceLeaf(prices=(), branch_prices=(-1,)),
            ),
            "price of a branch is negative",
        ),
    ],
)
def test_what_is_no_certificate_is_refused_by_name(root: CertificateNode, message: str) -> None:
    problem = a_problem([[(5, {0: 1, 1: 1})]] * 2, [1, 1])
    with pytest.raises(InvalidCertificate, match=message):
        check_certificate(problem, a_proof(root))
    with pytest.raises(InvalidCertificate, match="denominator"):
        check_certificate(problem, a_proof(root, denominator=0))


def test_a_certificate_of_a_deep_tree_can_be_pickled_and_written() -> None:
    root: CertificateNode = PriceLeaf(prices=((0, 2),), branch_prices=(0,) * TOO_DEEP)
    for depth in reversed(range(TOO_DEEP)):
        above = PriceLeaf(
            prices=(), knapsacks=(0,), branch_prices=(*(0,) * depth, 9), job_prices=((0, 1),)
        )
        root = Branch(columns=(0,), most=1, below=root, above=above)
    certificate = a_proof(root, bound=5)
    plain = certificate_to_plain(certificate)
    again = json.loads(json.dumps(plain))
    assert certificate_to_plain(certificate_from_plain(again)) == plain
    assert certificate_to_plain(pickle.loads(pickle.dumps(certificate))) == plain
    shallow = a_proof(PriceLeaf(prices=((0, 2),), knapsacks=(1,), job_prices=((3, -1),)))
    assert certificate_from_plain(certificate_to_plain(shallow)) == shallow


@pytest.mark.parametrize("above", [0, 3])
def test_nodes_that_are_no_tree_are_refused(above: int) -> None:
    leaf = {"branch_prices": [0]}
    branch = {"columns": [0], "most": 0, "below": 1, "above": above}
    plain = {"bound": 1, "denominator": 1, "nodes": [branch, leaf, leaf]}
    with pytest.raises(InvalidCertificate, match="not later nodes"):
        certificate_from_plain(plain)


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": []},
        {"nodes": [{"prices": [[0, 0.5]]}]},
        {"nodes": [{"prices": [[0, True]]}]},
        {"nodes": [{"prices": [[0]]}]},
        {"nodes": [{"branch_prices": ["1"]}]},
        {"nodes": [{"columns": [0], "most": 1}]},
        {"nodes": None},
        {"bound": math.inf},
        {"denominator": None},
    ],
)
def test_what_is_not_made_of_integers_is_no_certificate(change: dict[str, Any]) -> None:
    plain = certificate_to_plain(a_proof(PriceLeaf(prices=((0, 1),))))
    with pytest.raises(InvalidCertificate, match="it is not well formed"):
        certificate_from_plain({**plain, **change})


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
