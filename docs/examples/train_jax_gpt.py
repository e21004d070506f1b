"""A small GPT in JAX that trains under any execution plan of Tessera.

Submit it with the runtime jax, or try it alone with ``python train_jax_gpt.py --iterations 50``.
The model is a list of layers, which are pure functions with names. It says which axes of its
parameters tensor parallelism may divide. Everything else follows from the plan: replicas, ZeRO,
pipeline stages, micro-batches, recomputation and precision.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from tessera import progress
from tessera.jax import TENSOR, Layer, Model, Training, train

TRAIN_SAMPLES: Final = 4096  # in an epoch; validation and test samples follow them
HELD_OUT_SAMPLES: Final = 512  # of validation, and as many of the test
NOISY_SHARE: Final = 0.1  # of the tokens, which nobody can foresee


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the model. Each of 4 devices of tensor parallelism gets a head."""

    vocabulary: int = 64
    sequence: int = 32  # tokens
    width: int = 32
    heads: int = 4
    blocks: int = 4
    dropout: float = 0.0


def build_model(sizes: Sizes) -> Model:
    """Return the layers: an embedding, alike blocks that share their functions, and a head."""

    def init_embedding(key: jax.Array) -> dict[str, jax.Array]:
        token_key, place_key = jax.random.split(key)
        return {
            "tokens": 0.02 * jax.random.normal(token_key, (sizes.vocabulary, sizes.width)),
            "positions": 0.02 * jax.random.normal(place_key, (sizes.sequence, sizes.width)),
        }

    def embed(params: Any, tokens: jax.Array) -> jax.Array:
        return params["tokens"][tokens] + params["positions"][: tokens.shape[1]]

    def init_block(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 4)
        width, heads, size = sizes.width, sizes.heads, sizes.width // sizes.heads
        return {
            "attention_norm": init_norm(width),
            "qkv": init_dense(keys[0], (width,), (3, heads, size)),
            "out": init_dense(keys[1], (heads, size), (width,)),
            "feed_norm": init_norm(width),
            "up": init_dense(keys[2], (width,), (4 * width,)),
            "down": init_dense(keys[3], (4 * width,), (width,)),
        }

    def apply_block(params: Any, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        x = x + drop(attend(params, normalize(params["attention_norm"], x)), keys, 0)
        hidden = normalize(params["feed_norm"], x) @ params["up"]["kernel"] + params["up"]["bias"]
        fed = jax.nn.gelu(hidden) @ params["down"]["kernel"] + params["down"]["bias"]
        return x + drop(fed, keys, 1)

    def drop(x: jax.Array, keys: jax.Array | None, use: int) -> jax.Array:
        """Leave out values of each sample by its own key, so that no plan changes which."""
        if keys is None:
            return x

        def keep(key: jax.Array) -> jax.Array:
            key = jax.random.fold_in(key, use)
            return jax.random.bernoulli(key, 1 - sizes.dropout, x.shape[1:])

        return jnp.where(jax.vmap(keep)(keys), x / (1 - sizes.dropout), 0)

    def init_head(key: jax.Array) -> dict[str, Any]:
        return {
            "norm": init_norm(sizes.width),
            "logits": init_dense(key, (sizes.width,), (sizes.vocabulary,)),
        }

    def apply_head(params: Any, x: jax.Array) -> jax.Array:
        x = normalize(params["norm"], x)
        return x @ params["logits"]["kernel"] + params["logits"]["bias"]

    blocks = [
        Layer(
            name=f"block_{index}",
            init=init_block,
            apply=apply_block,
            divisions=BLOCK_DIVISIONS,
            is_random=sizes.dropout > 0,
        )
        for index in range(sizes.blocks)
    ]
    embedding = Layer(
        name="embedding",
        init=init_embedding,
        apply=embed,
        divisions={"tokens": PartitionSpec(TENSOR)},
    )
    head = Layer(
        name="head",
        init=init_head,
        apply=apply_head,
        divisions={
            "logits/kernel": PartitionSpec(None, TENSOR),
            "logits/bias": PartitionSpec(TENSOR),
        },
    )
    return Model(layers=(embedding, *blocks, head), loss=measure_loss, sequence_axis=1)


BLOCK_DIVISIONS: Final = {
    "qkv/kernel": PartitionSpec(None, None, TENSOR),
    "qkv/bias": PartitionSpec(None, TENSOR),
    "out/kernel": PartitionSpec(TENSOR),
    "up/kernel": PartitionSpec(None, TENSOR),
    "up/bias": PartitionSpec(TENSOR),
    "down/kernel": PartitionSpec(TENSOR),
}
"""Megatron-LM's rule: heads and the hidden values of the feed-forward network are divided."""


def init_norm(width: int) -> dict[str, jax.Array]:
    """Return the parameters of a layer norm."""
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def init_dense(
    key: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> dict[str, jax.Array]:
    """Return a kernel whose outputs have about the variance of its inputs, and a bias."""
    kernel = jax.random.normal(key, (*inputs, *outputs)) / np.sqrt(np.prod(inputs))
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def normalize(params: Any, x: jax.Array) -> jax.Array:
    """Return ``x`` with mean 0 and variance 1 along its last axis, then scaled."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]


def attend(params: Any, x: jax.Array) -> jax.Array:
    """Return what each token gathers from itself and from earlier tokens."""
    parts = jnp.einsum("bsw,wnhd->nbshd", x, params["qkv"]["kernel"])
    queries, keys, values = parts + params["qkv"]["bias"][:, None, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / np.sqrt(queries.shape[-1])
    is_seen = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    shares = jax.nn.softmax(jnp.where(is_seen, scores, -1e9), axis=-1)
    gathered = jnp.einsum("bhqk,bkhd->bqhd", shares, values)
    return jnp.einsum("bqhd,hdw->bqw", gathered, params["out"]["kernel"]) + params["out"]["bias"]


def measure_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean cross entropy of the next tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def load_tokens(seed: int, sample: int, sizes: Sizes) -> np.ndarray:
    """Return a sample: tokens that advance by a constant step, which the model has to find out."""
    generator = np.random.default_rng((seed, sample))
    start, step = generator.integers(sizes.vocabulary), generator.integers(1, 9)
    tokens = (start + step * np.arange(sizes.sequence + 1)) % sizes.vocabulary
    noise = generator.integers(sizes.vocabulary, size=tokens.shape)
    return np.where(generator.random(tokens.shape) < NOISY_SHARE, noise, tokens).astype(np.int32)


def load_batch(seed: int, samples: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and the targets of samples, each of shape [samples, tokens]."""
    tokens = np.stack([load_tokens(seed, int(sample), sizes) for sample in samples])
    return tokens[:, :-1], tokens[:, 1:]


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Return the optimizer."""
    return optax.adamw(learning_rate)


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=100, help="if Tessera gives no number")
    parser.add_argument("--batch", type=int, default=16, help="if Tessera gives no global batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--every", type=int, default=20, help="iterations between checkpoints")
    parser.add_argument("--folder", default="train_jax_gpt", help="if Tessera gives none")
    parser.add_argument("--precision", default="f32", choices=("f32", "bf16", "plan"))
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6, help="with the embedding and the head")
    parser.add_argument("--dropout", type=float, default=0.0, help="share of dropped values")
    parser.add_argument("--pause-s", type=float, default=0.0, help="waits, for demonstrations")
    parser.add_argument("--work-s", type=float, default=0.0, help="waits that the GPUs share")
    return parser.parse_args()


def main() -> None:
    """Train from the last checkpoint to the last iteration, or until a stop is requested."""
    options = read_options()
    sizes = Sizes(width=options.width, blocks=options.layers - 2, dropout=options.dropout)

    def wait(training: Training, _loss: float) -> None:
        time.sleep(options.pause_s + options.work_s / training.plan.gpus)

    train(
        build_model(sizes),
        make_optimizer(options.lr),
        load=lambda samples: load_batch(options.seed, samples, sizes),
        samples=TRAIN_SAMPLES,
        iterations=options.iterations,
        batch=options.batch,
        seed=options.seed,
        every=options.every,
        precision=None if options.precision == "plan" else options.precision,
        ledger=progress.job_dir(default=options.folder) / "ledger",
        on_iteration=wait if options.pause_s or options.work_s else None,
    )


if __name__ == "__main__":
    main()
