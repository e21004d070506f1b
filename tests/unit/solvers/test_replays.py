"""Recorded rounds are decided as by the version that recorded them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.recording import load_round, load_rounds, repeat


def test_recorded_rounds_exist() -> None:
    assert len(load_rounds()) > 50


@pytest.mark.parametrize("path", load_rounds(), ids=lambda path: path.name.partition(".")[0])
def test_a_recorded_round_is_decided_as_recorded(path: Path) -> None:
    recorded = load_round(path)

    assert repeat(recorded) == recorded.decided


def test_a_round_is_decided_alike_on_another_processor() -> None:
    """The order in which BLAS adds depends on the processor; it must not change a decision."""
    program = (
        "import sys; from pathlib import Path; from tests.support.recording import *\n"
        "rounds = [load_round(Path(path)) for path in sys.argv[1:]]\n"
        "sys.exit(int(any(repeat(one) != one.decided for one in rounds)))"
    )
    names = ("objective-deadline-2", "drawn-10", "solver-portfolio-7")
    paths = [str(path) for path in load_rounds() if path.name.partition(".")[0] in names]
    assert len(paths) == len(names)
    for processor in ("Prescott", "Haswell"):
        environment = os.environ | {"OPENBLAS_CORETYPE": processor}
        subprocess.run([sys.executable, "-c", program, *paths], env=environment, check=True)
