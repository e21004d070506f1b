"""A program that tries execution plans for the small GPT of the examples, or measures some in turn.

It reads its task from its input, as JSON, and prints what it measured. All seconds are CPU seconds
of the process.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
import optax

from tessera.jax import Engine, Plan, build_engine, read_plan
from tessera.jax.tuning import WARM_UP_ITERATIONS, PlainPlan, try_plans

SEED: Final = 0


class Trainer:
    """The GPT with a batch of random tokens, on the devices of this process."""

    def __init__(self, example: str, sizes: Mapping[str, int], batch: int) -> None:
        """Build the model. Nothing is compiled yet."""
        module = importlib.import_module(example)
        self._model = module.build_model(module.Sizes(**sizes))
        shape = batch, sizes["sequence"] + 1
        tokens = np.random.default_rng(SEED).integers(0, sizes["vocabulary"], shape)
        self._inputs = tokens[:, :-1].astype(np.int32)
        self._targets = tokens[:, 1:].astype(np.int32)

    def search_space(self, planned: PlainPlan, plans: Sequence[PlainPlan]) -> dict[str, Any]:
        """Try plans as a job's program does; return the time of each and of the whole search."""
        tuning = try_plans(
            self._make_engine,
            planned,
            plans,
            float("inf"),
            self._inputs,
            self._targets,
            seed=SEED,
            clock=time.process_time,
        )
        trials = [
            {"plan": trial.plan, "iteration_s": trial.iteration_s, "problem": trial.problem}
            for trial in tuning.trials
        ]
        return {"trials": trials, "spent_s": tuning.spent_s}

    def judge_plans(self, plans: Sequence[PlainPlan], rounds: int) -> dict[str, Any]:
        """Measure an iteration of each plan in each round, in an order that rotates."""
        engines = [self._make_engine(read_plan(plain)) for plain in plans]
        states = [engine.initial_state(SEED) for engine in engines]
        times: list[list[float]] = [[] for _ in plans]
        for turn in range(WARM_UP_ITERATIONS + rounds):
            for place in range(len(plans)):
                k = (place + turn) % len(plans)
                began_s = time.process_time()
                states[k], loss = engines[k].run_iteration(
                    states[k], self._inputs, self._targets, turn
                )
                jax.block_until_ready((states[k], loss))
                times[k].append(time.process_time() - began_s)
        return {"iteration_s": [own[WARM_UP_ITERATIONS:] for own in times]}

    def _make_engine(self, plan: Plan) -> Engine:
        return build_engine(self._model, optax.adam(1e-3), plan, jax.devices(), seed=SEED)


def main() -> None:
    """Carry out the task of the input."""
    task = json.load(sys.stdin)
    trainer = Trainer(**task["model"])
    does = trainer.search_space if "search" in task else trainer.judge_plans
    sys.stdout.write(json.dumps(does(**task.get("search", task.get("judge")))) + "\n")


if __name__ == "__main__":
    main()
