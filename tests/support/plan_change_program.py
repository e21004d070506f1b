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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

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


class Stretch(NamedTuple):
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
        self._losses: dict[tuple[int, tuple[Stretch, ...]], list[float]] = {}
        """The losses up to each checkpoint, by seed and parts."""

    def run(self, seed: int, parts: tuple[Stretch, ...]) -> list[float]:
        """Train the parts one after another, with a checkpoint between them. Return all losses.

        Every run begins from a checkpoint of the state at the beginning. Later runs that begin alike
        go on from the checkpoints of this one.
        """
        if (seed, ()) not in self._losses:
            first = self._engine(seed, next(iter(self._plans)))
            self._save(seed, (), first.initial_state(seed), [])
        done = max(n for n in range(len(parts)) if (seed, parts[:n]) in self._losses)
        losses = list(self._losses[seed, parts[:done]])
        for number in range(done, len(parts)):
            part, engine = parts[number], self._engine(seed, parts[number].plan)
            path = self._path(seed, parts[:number])
            state = load_checkpoint(path, engine, len(losses), seed)
            if part.forgets:
                fresh = load_checkpoint(self._path(seed, ()), engine, 0, seed)
                state = state._replace(optimizer=fresh.optimizer)
            state = self._train(engine, seed, state, losses, part.iterations)
            if number + 1 < len(parts):
                self._save(seed, parts[: number + 1], state, losses)
        return losses

    def _engine(self, seed: int, name: str) -> Engine:
        if (seed, name) not in self._engines:
            self._engines[seed, name] = build_engine(
                self._model,
                self._example.make_optimizer(self._learning_rate),
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

    def _save(
        self, seed: int, parts: tuple[Stretch, ...], state: TrainState, losses: list[float]
    ) -> None:
        save_checkpoint(self._path(seed, parts), state, len(losses), seed)
        self._losses[seed, parts] = list(losses)

    def _path(self, seed: int, parts: tuple[Stretch, ...]) -> Path:
        return self._folder / f"{seed}-{len(parts)}-{hash(parts)}"


def train_wanted_runs() -> None:
    """Run what the input asks for."""
    wanted = json.load(sys.stdin)
    with tempfile.TemporaryDirectory(prefix="tessera-reconfigure-") as folder:
        trainer = Trainer(wanted, Path(folder))
        for run in wanted["runs"]:
            losses = trainer.run(run["seed"], tuple(Stretch(**part) for part in run["parts"]))
            sys.stdout.write(json.dumps({"name": run["name"], "losses": losses}) + "\n")


if __name__ == "__main__":
    train_wanted_runs()
