"""The program of ``jax_programs``: it reads cases, trains each, and prints the losses as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from tessera.jax.build import build_engine
from tessera.jax.plans import read_plan
from tests.support.jax_models import make_batches, make_expert_gpt, make_gpt, make_random_gpt

MODELS = {"gpt": make_gpt(), "random": make_random_gpt(), "experts": make_expert_gpt()}
SAMPLES = 8


def train_case(model: str, plan: Any, iterations: int) -> dict[str, Any]:
    """Return the losses of a case, and a digest of the state that it began with."""
    optimizer = optax.adamw(1e-2)
    engine = build_engine(
        MODELS[model], optimizer, read_plan(plan), jax.devices(), seed=3, clip_norm=0.5
    )
    state = engine.initial_state(7)
    digest = digest_state(state)
    losses = []
    batches = make_batches(iterations, SAMPLES)
    for iteration, (inputs, targets) in enumerate(batches):
        state, loss = engine.run_iteration(state, inputs, targets, iteration)
        losses.append(float(loss))
    evaluation = float(engine.evaluate(state, *batches[0]))
    return {"losses": losses, "evaluation": evaluation, "start": digest}


def digest_state(state: Any) -> str:
    """Return the digest of all bits of a state."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        is_here = leaf.is_fully_addressable
        whole = leaf if is_here else multihost_utils.process_allgather(leaf, tiled=True)
        digest.update(np.asarray(whole).tobytes())
    return digest.hexdigest()


def main() -> None:
    """Train the cases of the standard input."""
    warnings.simplefilter("error")
    work = json.load(sys.stdin)
    if work["processes"] > 1:
        jax.distributed.initialize(sys.argv[1], work["processes"], int(sys.argv[2]))
    results = {
        name: train_case(model, plan, work["iterations"])
        for name, (model, plan) in work["cases"].items()
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
