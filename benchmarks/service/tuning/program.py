"""The program of the benchmark: a small GPT that tries plans, or measures some of them in turn.

It is started in a process of its own, and nothing imports it. It reads a task in JSON from standard
input and writes what it measured to standard output. All seconds are CPU seconds of the process.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from tessera.jax.build import build_engine
from tessera.jax.models import TENSOR, Layer, Model, Params, Values
from tessera.jax.plans import Plan, read_plan
from tessera.jax.tuning import WARM_UP_ITERATIONS, try_plans

SEED: Final = 0


def main() -> None:
    """Carry out the task of standard input."""
    task = json.load(sys.stdin)
    trainer = SmallTrainer(**task["model"])
    result = (
        trainer.search(**task["search"]) if "search" in task else trainer.judge(**task["judge"])
    )
    json.dump(result, sys.stdout)


class SmallTrainer:
    """A GPT with random data, on the devices of this process."""

    def __init__(
        self, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, batch: int
    ) -> None:
        self._model = gpt(layers, hidden, heads, sequence, vocabulary)
        tokens = np.random.default_rng(SEED).integers(0, vocabulary, (batch, sequence + 1))
        self._inputs = tokens[:, :-1].astype(np.int32)
        self._targets = tokens[:, 1:].astype(np.int32)

    def search(self, planned: dict[str, Any], plans: list[dict[str, Any]]) -> dict[str, Any]:
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
            {"plan": t.plan, "iteration_s": t.iteration_s, "problem": t.problem}
            for t in tuning.trials
        ]
        return {"trials": trials, "spent_s": tuning.spent_s}

    def judge(self, plans: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
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

    def _make_engine(self, plan: Plan) -> Any:
        return build_engine(self._model, optax.adam(1e-3), plan, jax.devices(), seed=SEED)


def gpt(layers: int, hidden: int, heads: int, sequence: int, vocabulary: int) -> Model:
    """Return a GPT: an embedding, blocks and a head, each a layer."""

    def init_embedding(key: jax.Array) -> Params:
        token, place = jax.random.split(key)
        return {
            "token": 0.02 * jax.random.normal(token, (vocabulary, hidden)),
            "place": 0.02 * jax.random.normal(place, (sequence, hidden)),
        }

    def embed(params: Params, tokens: Values) -> Values:
        embedded: jax.Array = params["token"][tokens] + params["place"]
        return embedded

    def init_block(key: jax.Array) -> Params:
        keys = jax.random.split(key, 4)
        width = hidden // heads
        shapes = {
            "qkv": (hidden, 3, heads, width),
            "out": (heads, width, hidden),
            "up": (hidden, 4 * hidden),
            "down": (4 * hidden, hidden),
        }
        return {
            name: 0.02 * jax.random.normal(own, shape)
            for own, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def apply_block(params: Params, x: Values) -> Values:
        q, k, v = jnp.moveaxis(jnp.einsum("bsh,hcnw->bscnw", normalise(x), params["qkv"]), 2, 0)
        scores = jnp.einsum("bsnw,btnw->bnst", q, k) / np.sqrt(hidden // heads)
        mask = jnp.tril(jnp.ones((sequence, sequence), dtype=bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        mixed = jnp.einsum("bnst,btnw->bsnw", weights, v)
        x = x + jnp.einsum("bsnw,nwh->bsh", mixed, params["out"])
        return x + jax.nn.gelu(normalise(x) @ params["up"]) @ params["down"]

    def init_head(key: jax.Array) -> Params:
        return {"kernel": 0.02 * jax.random.normal(key, (hidden, vocabulary))}

    def apply_head(params: Params, x: Values) -> Values:
        return normalise(x) @ params["kernel"]

    def loss(logits: Values, targets: Values) -> jax.Array:
        each: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return each.mean()

    divisions = {
        "qkv": PartitionSpec(None, None, TENSOR),
        "out": PartitionSpec(TENSOR),
        "up": PartitionSpec(None, TENSOR),
        "down": PartitionSpec(TENSOR),
    }
    blocks = [
        Layer(name=f"block-{k}", init=init_block, apply=apply_block, divisions=divisions)
        for k in range(layers)
    ]
    head = Layer(
        name="head",
        init=init_head,
        apply=apply_head,
        divisions={"kernel": PartitionSpec(None, TENSOR)},
    )
    embedding = Layer(name="embedding", init=init_embedding, apply=embed)
    return Model(layers=(embedding, *blocks, head), loss=loss)


def normalise(x: Values) -> Values:
    """Return values of mean 0 and variance 1 along the last axis."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


if __name__ == "__main__":
    main()
