"""After a solver has run, Ctrl-C still reaches this program and not only the solver's library."""

from __future__ import annotations

import subprocess
import sys

from tessera.simulator.provenance import ROOT
from tessera.solvers import registry

SOLVE_AND_INTERRUPT = """
import math, signal, sys
from tessera.solvers import registry
from tessera.solvers.base import Budget
from tests.support.builders import a_random_problem

problem = a_random_problem(seed=1, jobs=12)
for name in sys.argv[1:]:
    registry.make_solver(name).solve(problem, Budget(remaining_s=lambda: math.inf, gap=0.0))
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print(name, flush=True)
"""


def test_an_interrupt_still_works_after_any_solver() -> None:
    names = [*registry.solver_names(), *registry.baseline_names()]
    done = subprocess.run(
        [sys.executable, "-c", SOLVE_AND_INTERRUPT, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == names, done.stderr
