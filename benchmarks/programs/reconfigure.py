"""A program that trains the small GPT of the examples in runs, each under one plan after another.

It reads what to run from its input, as JSON, and prints a line of JSON for each run. Each engine is
built once, and runs that begin alike share checkpoints, so that thousands of iterations take
minutes.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from tessera.jax import (
    Engine,
    SampleOrder,
    TrainState,
    build_engine,
    load_checkpoint,
    read_plan,
    save_checkpoint,
)

DATA_SEED = 7
"""The seed of the data, which are the same in every run. A run's seed is that of its parameters, of
its dropout and of the order of its samples."""


class Part(NamedTuple):
    """Iterations of a run under one plan. If it ``forgets``, its optimizer begins again."""

    plan: str
    iterations: int
    forgets: bool = False


class Trainer:
    """The model with an engine for each seed and plan, and the checkpoints of what was trained."""

    def __init__(self, wanted: Mapping[str, Any], folder: Path) -> None:
        """Build the model. Engines follow when they are needed."""
        self._example = importlib.import_module(wanted["example"])
        self._sizes = self._example.Sizes(**wanted["sizes"])
        self._model = self._example.build_model(self._sizes)
        self._plans, self._batch = wanted["plans"], int(wanted["batch"])
        self._learning_rate, self._folder = float(wanted["learning_rate"]), folder
        self._engines: dict[tuple[int, str], Engine] = {}
        self._saved: dict[tuple[int, tuple[Part, ...]], list[float]] = {}
        """The losses up to each checkpoint, by seed and parts."""

    def run(self, seed: int, parts: tuple[Part, ...]) -> list[float]:
        """Train the parts one after another, with a checkpoint between them. Return all losses.

        Later runs that begin alike go on from these checkpoints.
        """
        done = max((n for n in range(len(parts)) if (seed, parts[:n]) in self._saved), default=0)
        losses = list(self._saved.get((seed, parts[:done]), ()))
        for number in range(done, len(parts)):
            part, before = parts[number], parts[:number]
            engine = self._engine(seed, part.plan)
            state = engine.initial_state(seed)
            if before:
                saved = load_checkpoint(self._path(seed, before), engine, len(losses), seed)
                state = state._replace(parameters=saved.parameters) if part.forgets else saved
            state = self._train(engine, seed, state, losses, part.iterations)
            if number + 1 < len(parts):
                path = self._path(seed, parts[: number + 1])
                save_checkpoint(path, state, len(losses), seed)
                self._saved[seed, parts[: number + 1]] = list(losses)
            self._state, self._last = state, engine
        return losses

    def judge(self, first: int) -> float:
        """Return the loss of held-out samples after the last run, beginning with ``first``."""
        count = self._example.HELD_OUT_SAMPLES // self._batch
        total = 0.0
        for number in range(count):
            samples = first + np.arange(number * self._batch, (number + 1) * self._batch)
            total += float(self._last.evaluate(self._state, *self._load(samples)))
        return total / count

    def held_out(self) -> dict[str, float]:
        """Return the losses of the validation and test samples after the last run."""
        first, count = self._example.TRAIN_SAMPLES, self._example.HELD_OUT_SAMPLES
        return {"validation": self.judge(first), "test": self.judge(first + count)}

    def _engine(self, seed: int, name: str) -> Engine:
        if (seed, name) not in self._engines:
            self._engines[seed, name] = build_engine(
                self._model,
                optax.adamw(self._learning_rate),
                read_plan(self._plans[name]),
                jax.devices(),
                seed=seed,
            )
        return self._engines[seed, name]

    def _train(
        self, engine: Engine, seed: int, state: TrainState, losses: list[float], iterations: int
    ) -> TrainState:
        order = SampleOrder(samples=self._example.TRAIN_SAMPLES, batch=self._batch, seed=seed)
        for iteration in range(len(losses), len(losses) + iterations):
            batch = self._load(order.samples_of(iteration))
            state, loss = engine.run_iteration(state, *batch, iteration)
            losses.append(float(loss))
        return state

    def _load(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = self._example.load_batch(DATA_SEED, samples, self._sizes)
        return inputs, targets

    def _path(self, seed: int, parts: Sequence[Part]) -> Path:
        return self._folder / f"{seed}-{len(parts)}-{hash(tuple(parts))}"


def main() -> None:
    """Run what the input asks for."""
    wanted = json.load(sys.stdin)
    with tempfile.TemporaryDirectory(prefix="tessera-reconfigure-") as folder:
        trainer = Trainer(wanted, Path(folder))
        for run in wanted["runs"]:
            losses = trainer.run(run["seed"], tuple(Part(**part) for part in run["parts"]))
            held_out = trainer.held_out() if wanted["judges"] else {}
            line = json.dumps({"name": run["name"], "losses": losses, **held_out})
            sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
