"""Runs of a training program in JAX, in a process of its own: this one never imports JAX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tessera.benchmarks.service.reconfigure.plans import BATCH, DEVICES
from tessera.formulation.execution_plan import ExecutionPlan
from tessera.simulator.data import MissingData

ROOT: Final = Path(__file__).resolve().parents[3]
EXAMPLES: Final = ROOT / "docs" / "examples"
PROGRAMS: Final = Path(__file__).resolve().parents[2] / "programs"

GPT: Final = "train_jax_gpt"
RESNET: Final = "train_jax_resnet"
LEARNING_RATE: Final = 3e-3
LEARNING_RATES: Final = MappingProxyType({RESNET: 0.05})
NO_SIZES: Final[Mapping[str, float]] = MappingProxyType({})
NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})

SHOWN_CHARACTERS: Final = 2000
"""Characters of a program's complaints that an error repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Iterations of a run under one plan. If it ``forgets``, its optimizer begins again."""

    plan: str
    iterations: int
    forgets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Parts that follow each other, each from the checkpoint of the one before."""

    name: str
    seed: int
    parts: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The loss of each iteration of a run, and those of held-out samples, NaN if not measured."""

    losses: Sequence[float]
    validation: float
    test: float


def train_runs(
    plans: Mapping[str, ExecutionPlan],
    runs: Sequence[Run],
    *,
    example: str = GPT,
    sizes: Mapping[str, float] = NO_SIZES,
    measures: bool = False,
) -> dict[str, Outcome]:
    """Train the runs on virtual devices of the processor. Return the outcome of each by its name.

    ``example`` is a module of ``docs/examples``, and ``sizes`` are those of its model that are not as
    usual. The first plan makes the initial state. If it ``measures``, held-out samples are, too.

    Raises:
        MissingData: the examples are not installed here.
        RuntimeError: the program failed.
    """
    wanted = {
        "example": example,
        "sizes": dict(sizes),
        "batch": BATCH,
        "learning_rate": LEARNING_RATES.get(example, LEARNING_RATE),
        "plans": {name: json.loads(plan.to_json()) for name, plan in plans.items()},
        "runs": [asdict(run) for run in runs],
        "measures": measures,
    }
    outcomes = {}
    for line in run_program("reconfigure", json.dumps(wanted), DEVICES):
        found = json.loads(line)
        outcomes[found["name"]] = Outcome(
            losses=found["losses"],
            validation=found.get("validation", float("nan")),
            test=found.get("test", float("nan")),
        )
    return outcomes


def run_program(
    name: str, given: str, devices: int, variables: Mapping[str, str] = NO_VARIABLES
) -> list[str]:
    """Run a program of the folder ``programs`` on virtual devices. Return the lines that it prints.

    ``variables`` are added to its environment, and ``given`` is its input.

    Raises:
        MissingData: the examples are not installed here.
        RuntimeError: the program failed.
    """
    if not EXAMPLES.is_dir():  # an installed package has no examples
        raise MissingData(f"{EXAMPLES} does not exist; run this benchmark in the repository")
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / f"{name}.py")],
        input=given,
        capture_output=True,
        text=True,
        env={**program_environment(devices), **variables},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"the program {name} ended with {done.returncode}: {done.stderr[-SHOWN_CHARACTERS:]}"
        )
    return done.stdout.splitlines()


def program_environment(devices: int) -> dict[str, str]:
    """Return the variables of a program that trains on this many virtual devices."""
    flags = os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}"
    own = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
        ),
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    return {**kept, **own}
