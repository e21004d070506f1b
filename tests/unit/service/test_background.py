"""Computations in a process of their own."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tessera.formulation.base.errors import Unavailable
from tessera.service.server.rounds.background import run_in_process


def divide_by(divisor: int) -> float:
    return 1 / divisor


def die(code: int) -> None:
    os._exit(code)


@pytest.mark.parametrize(
    ("work", "order", "error"),
    [(divide_by, 0, "ZeroDivisionError: division by zero"), (die, 7, "exit code 7")],
)
def test_a_failure_in_the_process_is_an_error_that_says_why(
    work: Callable[[int], object], order: int, error: str
) -> None:
    with pytest.raises(Unavailable, match=error):
        run_in_process(work, order, lambda: False, name="test")
