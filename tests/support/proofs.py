"""Random problems with identical jobs, waiting that uses rows and gangs, and random certificates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.formulation.answer.certificate_check import check_certificate
from tessera.formulation.answer.certificates import (
    Branch,
    Certificate,
    CertificateNode,
    PriceLeaf,
    certificate_from_plain,
)
from tessera.formulation.answer.proofs import GoalProof, RoundProof
from tessera.formulation.answer.solution import RecordedAnswer
from tessera.formulation.base.errors import InvalidCertificate
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tests.support.problems import Option, a_problem

ANY_BOUND = 10**40
"""A bound that every certificate of a small problem proves."""


def a_random_problem(seed: int, *, jobs: int = 5, with_idle: bool = True) -> Problem:
    """Return a problem of up to ``jobs`` jobs of few kinds. Each column uses at most two rows.

    Some jobs must run, some use rows by waiting, and some amounts have a common divisor.
    """
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(1, 4))
    unit = int(draw.choice([1, 1, 2, 5]))

    def use() -> dict[int, int]:
        picked = draw.choice(rows, size=int(draw.integers(0, min(rows, 2) + 1)), replace=False)
        return {int(r): unit * int(draw.integers(0, 5)) for r in picked}

    def option() -> Option:
        return int(draw.choice([1, 3])) * int(draw.integers(-2, 12)), use()

    kinds = [[option() for _ in range(int(draw.integers(0, 4)))] for _ in range(3)]
    drawn = [kinds[int(draw.integers(0, 3))] for _ in range(int(draw.integers(1, jobs + 1)))]
    must = [j for j in range(len(drawn)) if draw.random() < 0.2]
    capacity = [unit * int(draw.integers(0, 9)) + int(draw.integers(0, 2)) for _ in range(rows)]
    problem = a_problem(drawn, capacity, must_run=must)
    if not with_idle or draw.random() < 0.5:
        return problem
    idle_of = [{0: unit * int(draw.integers(1, 3))} if kind else {} for kind in kinds]
    idles = [idle_of[kinds.index(kind)] for kind in drawn]
    return replace(
        problem,
        idle_start=np.cumsum([0, *(len(idle) for idle in idles)]),
        idle_row=np.array([r for idle in idles for r in idle], np.int64),
        idle_amount=np.array([a for idle in idles for a in idle.values()], np.int64),
    )


def spelled_columns(problem: Problem) -> list[list[tuple[int, int, dict[int, int]]]]:
    """Return (number, value, uses) of each job's columns, with waiting as a column where it uses rows."""
    number, jobs = 0, []
    for job in range(len(problem.jobs)):
        options = [(int(problem.value[c]), problem.usage_of(c)) for c in problem.columns_of(job)]
        if problem.idle_usage_of(job) and not problem.must_run[job]:
            options.append((0, problem.idle_usage_of(job)))
        room = [row.capacity for row in problem.rows]
        jobs.append(
            [
                (number + k, value, use)
                for k, (value, use) in enumerate(options)
                if all(amount <= room[r] for r, amount in use.items())
            ]
        )
        number += len(options)
    return jobs


def best_objective(problem: Problem) -> int | None:
    """Return the optimum by trying all choices, or None if the must-run jobs do not fit."""
    choice = best_choice(problem)
    return None if choice is None else int(problem.value[choice[choice >= 0]].sum())


def a_random_certificate(
    problem: Problem, seed: int, *, denominator: int | None = None
) -> Certificate:
    """Return a certificate with random prices, branches and knapsacks, and the bound it proves."""
    draw = np.random.default_rng([seed, 1])
    scale = denominator or int(draw.choice([1, 4, 7, 1024]))
    classes = _classes(problem)
    columns = [column for _, _, of_class in classes for column in of_class]

    def price(size: int) -> int:
        return int(draw.integers(0, size * scale + 1))

    def leaf(depth: int) -> PriceLeaf:
        priced = {r: price(6) for r in range(len(problem.rows)) if draw.random() < 0.8}
        knapsacks = _apart(problem, draw) if draw.random() < 0.5 else ()
        job_prices = []
        for job, may_wait, _ in classes if knapsacks else ():
            job_prices.append((job, price(8) - (0 if may_wait else price(8))))
        return PriceLeaf(
            prices=tuple((r, p) for r, p in priced.items() if r not in knapsacks),
            branch_prices=tuple(price(5) if draw.random() < 0.7 else 0 for _ in range(depth)),
            knapsacks=knapsacks,
            job_prices=tuple(job_prices),
        )

    def node(depth: int) -> CertificateNode:
        if depth == 3 or not columns or draw.random() < 0.4:
            return leaf(depth)
        picked = draw.choice(columns, size=int(draw.integers(1, len(columns) + 1)), replace=False)
        return Branch(
            columns=tuple(sorted(map(int, picked))),
            most=int(draw.integers(0, 3)),
            below=node(depth + 1),
            above=node(depth + 1),
        )

    drawn = Certificate(bound=ANY_BOUND, denominator=scale, root=node(0))
    return replace(drawn, bound=check_certificate(problem, drawn))


def _classes(problem: Problem) -> list[tuple[int, bool, list[int]]]:
    """Return (first job, whether it may wait for nothing, its columns) of each class."""
    seen, classes = [], []
    for job, options in enumerate(spelled_columns(problem)):
        must = bool(problem.must_run[job]) or bool(problem.idle_usage_of(job))
        content = ([(value, list(use.items())) for _, value, use in options], must)
        if content not in seen:
            seen.append(content)
            classes.append((job, not must, [number for number, _, _ in options]))
    return classes


def _apart(problem: Problem, draw: np.random.Generator) -> tuple[int, ...]:
    """Return rows of which no column uses two."""
    uses = [use for options in spelled_columns(problem) for _, _, use in options]
    rows: list[int] = []
    for row in draw.permutation(len(problem.rows)).tolist():
        if not any(use.get(row) and use.get(other) for use in uses for other in rows):
            rows.append(row)
    return tuple(sorted(rows))


def tampered(problem: Problem, certificate: Certificate, seed: int) -> Certificate:
    """Return the certificate with one thing changed: prices, bound, a case, a column or a class."""
    draw = np.random.default_rng([seed, 2])
    changes: list[Callable[[PriceLeaf], PriceLeaf]] = [
        lambda leaf: replace(leaf, prices=tuple((r, -p - 1) for r, p in leaf.prices)),
        lambda leaf: replace(leaf, prices=tuple((r, p // 3) for r, p in leaf.prices)),
        lambda leaf: replace(leaf, prices=((len(problem.rows), 1), *leaf.prices)),
        lambda leaf: replace(leaf, branch_prices=(*leaf.branch_prices, 2)),
        lambda leaf: replace(leaf, branch_prices=tuple(-p - 1 for p in leaf.branch_prices)),
        lambda leaf: replace(leaf, job_prices=((len(problem.jobs) - 1, 1), *leaf.job_prices[:-1])),
        lambda leaf: replace(leaf, job_prices=tuple((j, -7 - p) for j, p in leaf.job_prices)),
        lambda leaf: replace(leaf, knapsacks=tuple(range(len(problem.rows)))),
        lambda leaf: replace(leaf, knapsacks=()),
    ]

    def change(node: CertificateNode) -> CertificateNode:
        if isinstance(node, PriceLeaf):
            return changes[int(draw.integers(len(changes)))](node)
        way = int(draw.integers(5))
        if way == 0:
            return node.below
        if way == 1:
            return replace(node, most=node.most + 1)
        if way == 2:
            return replace(node, columns=tuple(c + 1 for c in node.columns))
        if way == 3:
            return replace(node, below=change(node.below))
        return replace(node, above=change(node.above))

    if draw.random() < 0.2:
        return replace(certificate, bound=certificate.bound - 1)
    if draw.random() < 0.1:
        return replace(certificate, denominator=certificate.denominator * 2)
    return replace(certificate, root=change(certificate.root))


def best_choice(problem: Problem) -> Ints | None:
    """Return a best choice by trying all, int64[jobs], or None if the must-run jobs do not fit."""
    ways = [
        [*([] if problem.must_run[j] else [-1]), *problem.columns_of(j)]
        for j in range(len(problem.jobs))
    ]
    best: Ints | None = None
    most = -math.inf
    for choice in itertools.product(*ways):
        picked = np.array(choice, np.int64)
        worth = int(problem.value[picked[picked >= 0]].sum())
        if worth > most and (problem.used(picked) <= problem.capacity).all():
            best, most = picked, worth
    return best


def read_document(goal: dict[str, Any]) -> tuple[Problem, Certificate]:
    """Return the problem and the certificate of a document's goal, in its units and steps.

    Only jobs of a class are written out, and waiting is a column already.
    """
    jobs: list[list[Option]] = []
    must: list[int] = []
    number: list[list[int]] = []
    first: list[int] = []
    for kind in goal["classes"]:
        first.append(len(jobs))
        start = sum(len(job) for job in jobs)
        number.append([start + c for c in range(len(kind["columns"]))])
        for _ in range(kind["jobs"]):
            must += [len(jobs)] if kind["must_run"] else []
            jobs.append([(value, dict(uses)) for value, uses, _ in kind["columns"]])
    plain = {
        "bound": goal["bound"],
        "denominator": goal["denominator"],
        "nodes": [
            {**node, "columns": [number[k][c] for k, c in node["columns"]]}
            if "columns" in node
            else {**node, "job_prices": [(first[k], price) for k, price in node["job_prices"]]}
            for node in goal["nodes"]
        ],
    }
    problem = a_problem(jobs, [row["room"] for row in goal["rows"]], must_run=must)
    return problem, certificate_from_plain(plain)


def proves(problem: Problem, certificate: Certificate) -> int | None:
    """Return what our checker accepts as proven, or None if it refuses the certificate."""
    try:
        return check_certificate(problem, certificate)
    except InvalidCertificate:
        return None


def a_round_proof() -> RoundProof:
    """Return the proof of a round with a goal of levels, a sum with a tree, and a recorded answer."""
    leaf = PriceLeaf(prices=((0, 2**70), (3, 1)), branch_prices=(5,))
    knapsack = PriceLeaf(
        prices=((1, 4),), branch_prices=(0,), knapsacks=(2,), job_prices=((0, -7), (4, 7))
    )
    root = Branch(columns=(0, 3), most=2, below=leaf, above=knapsack)
    return RoundProof(
        goals=(
            GoalProof(floor=(3.5, math.inf)),
            GoalProof(certificate=Certificate(bound=41, denominator=2**20, root=root)),
        ),
        recorded=(
            RecordedAnswer(stage="2:cp-sat", changes=((0, 4), (7, -1)), bound=41.0),
            RecordedAnswer(stage="packing 1/3:lp", changes=(), bound=math.inf),
        ),
        widened=("a100", "h100"),
        packing=("packing/a100: shares of 5-8 count 1",),
    )
