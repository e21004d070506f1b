"""A program that saves a tiny GPT under one plan, and goes on from that under others.

It reads its work from the standard input, and prints losses, digests and refusals as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from tessera.jax.build import build_engine
from tessera.jax.checkpoints import DESCRIPTION, STATE, load_checkpoint, save_checkpoint
from tessera.jax.engines import Engine, TrainState
from tessera.jax.errors import CheckpointRefused
from tessera.jax.models import Model
from tessera.jax.plans import read_plan
from tests.support.jax_models import make_batches, make_expert_gpt, make_gpt

SAVED, LAST, SAMPLES, SEED = 4, 8, 8, 7
BATCHES = make_batches(LAST, SAMPLES)


def make_engine(
    plan: Any,
    model: Model | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Engine:
    """Return an engine for a plan, with AdamW and the tiny GPT unless others are given."""
    return build_engine(
        model or make_gpt(),
        optimizer or optax.adamw(1e-2),
        read_plan(plan),
        jax.devices(),
        seed=SEED,
    )


def train(
    engine: Engine, state: TrainState, begin: int, end: int
) -> tuple[TrainState, list[float]]:
    """Return the state and the losses after the iterations ``begin`` to ``end`` (exclusive)."""
    losses = []
    for iteration in range(begin, end):
        state, loss = engine.run_iteration(state, *BATCHES[iteration], iteration)
        losses.append(float(loss))
    return state, losses


def copy_state(state: TrainState) -> dict[str, Any]:
    """Return all arrays of a state on the host, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def resume(path: Path, plan: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the losses after the checkpoint, and whether all bits and places were restored."""
    engine = make_engine(plan)
    state = load_checkpoint(path, engine, SAVED, SEED)
    restored = copy_state(state)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(engine.state_shapes()), strict=True)
    return {
        "is_equal": restored.keys() == saved.keys()
        and all(np.array_equal(restored[name], saved[name]) for name in saved),
        "is_placed": all(leaf.sharding == target.sharding for leaf, target in pairs),
        "losses": train(engine, state, SAVED, LAST)[1],
    }


def refuse(path: Path, engine: Engine, iterations: int = SAVED, seed: int = SEED) -> str:
    """Return the sentence by which a checkpoint is refused, or nothing if it is read."""
    try:
        load_checkpoint(path, engine, iterations, seed)
    except CheckpointRefused as error:
        return str(error)
    return ""


def list_damages(path: Path) -> dict[str, Callable[[Path], None]]:
    """Return damages of each file of a checkpoint: it is missing, or half of its bytes are."""
    damages: dict[str, Callable[[Path], None]] = {}
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        name = str(file.relative_to(path))
        damages[f"without {name}"] = lambda copy, name=name: (copy / name).unlink()  # type: ignore[misc]
        if file.stat().st_size:
            damages[f"half of {name}"] = lambda copy, name=name: cut(copy / name)  # type: ignore[misc]
    return damages


def cut(file: Path) -> None:
    """Remove the second half of a file."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def damage(path: Path, engine: Engine) -> dict[str, str]:
    """Return the refusal of each damaged copy of a checkpoint."""
    refusals = {}
    copy = path.with_name("copy")
    for name, harm in list_damages(path).items():
        shutil.copytree(path, copy)
        harm(copy)
        refusals[name] = refuse(copy, engine)
        shutil.rmtree(copy)
    return refusals


def rewrite(path: Path, **fields: Any) -> Path:
    """Return a copy of a checkpoint whose description has other fields."""
    copy = path.with_name("rewritten")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    description = json.loads((copy / DESCRIPTION).read_text())
    (copy / DESCRIPTION).write_text(json.dumps(description | fields))
    return copy


def main() -> None:
    """Do the work of the standard input: ``folder``, ``saving`` (a plan) and ``plans`` by names."""
    warnings.simplefilter("error")
    work = json.load(sys.stdin)
    path = Path(work["folder"]) / f"iteration-{SAVED}"
    engine = make_engine(work["saving"])
    state, before = train(engine, engine.initial_state(SEED), 0, SAVED)
    save_checkpoint(path, state, SAVED, SEED)
    saved = copy_state(state)
    _, after = train(engine, state, SAVED, LAST)
    alone = make_engine(work["alone"])
    results = {
        "undisturbed": before + after,
        "names": sorted(file.name for file in path.parent.iterdir()),
        "resumed": {name: resume(path, plan, saved) for name, plan in work["plans"].items()},
        "damages": damage(path, alone),
        "others": {
            "another model": refuse(path, make_engine(work["alone"], model=make_expert_gpt())),
            "another optimizer": refuse(path, make_engine(work["alone"], optimizer=optax.sgd(0.1))),
            "another iteration": refuse(path, alone, iterations=SAVED + 1),
            "another seed": refuse(path, alone, seed=SEED + 1),
            "a later format": refuse(rewrite(path, format=99), alone),
            "no description": refuse(path / STATE, alone),
        },
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
