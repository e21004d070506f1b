"""The JSON of rounds: values read back equal, and malformed text is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.formulation.codec import decode, digest, encode
from tessera.formulation.errors import InvalidInput
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution, SolveStatus
from tests.support.builders import a_job, a_random_problem, a_random_snapshot, a_snapshot


def test_a_snapshot_with_infinities_reads_back_equal() -> None:
    snapshot = a_random_snapshot(1, jobs=5)
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert math.isinf(again.jobs.deadline_s[0])
    for table in ("nodes", "estimates", "jobs", "allocations"):
        assert getattr(again, table).equals(getattr(snapshot, table))
    assert digest(again) == digest(snapshot)


def test_a_job_may_be_called_inf() -> None:
    snapshot = a_snapshot(nodes=[], jobs=[a_job("inf"), a_job("nan")], estimates=[])
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert again.jobs.name == ("inf", "nan")


def test_a_problem_reads_back_with_the_same_values() -> None:
    problem = a_random_problem(2, jobs=5)
    again = decode(encode(problem))
    assert isinstance(again, Problem)
    assert encode(again) == encode(problem)
    assert again.value.tolist() == problem.value.tolist()


def test_a_solution_reads_back() -> None:
    solution = Solution(
        status=SolveStatus.FEASIBLE,
        choice=np.array([3, -1]),
        objective=7,
        bound=math.inf,
        solver="s",
        prices=np.array([0.5]),
        work=(("s", 1.0),),
    )
    again = decode(encode(solution))
    assert isinstance(again, Solution)
    assert (again.status, again.bound, again.work) == (solution.status, math.inf, solution.work)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"format":99,"body":1}',
        b'{"format":1}',
        b'{"format":1,"body":{"is":"Nothing"}}',
        b'{"format":1,"body":{"is":"Nodes","name":["a"]}}',
        b'{"format":1,"body":7}',
        b'{"format":1,"body":null}',
        b'{"format":1,"body":NaN}',
        b'{"format":1,"body":{"i":[1180591620717411303424]}}',
        b'{"format":1,"body":{"i":[1.5]}}',
        b"[" * 100_000,
        b'{"format":1,"body":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"format":1,"body":{"x":[1],"y":[2]}}',
        b'{"format":1,"body":{"q":[1]}}',
    ],
)
def test_malformed_stored_values_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(text)


def test_a_snapshot_with_meaningless_numbers_is_refused() -> None:
    text = encode(a_random_snapshot(1, jobs=2)).replace(
        b'"weight":{"f":[1.0', b'"weight":{"f":["nan"'
    )
    with pytest.raises(InvalidInput, match="weight"):
        decode(text)
