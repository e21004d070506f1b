"""A small mixture of experts in JAX that trains under any execution plan of Tessera.

Submit it with the runtime jax, or try it alone with ``python train_jax_moe.py --iterations 50``.
Each sequence is a routing group of its own: its experts take at most a fixed number of its tokens.
So layers mix no samples, and no plan changes which tokens an expert takes.

A router compares numbers, and plans add numbers up in other orders. Where two experts are equal for
a token to the last digit, plans may choose differently, and losses differ by that token's share.
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
from tessera.jax import EXPERT, TENSOR, Layer, Model, Training, constrain, train

TRAIN_SAMPLES: Final = 4096  # in an epoch; validation and test samples follow them
HELD_OUT_SAMPLES: Final = 512  # of validation, and as many of the test
BALANCE_WEIGHT: Final = 0.01  # of the auxiliary loss, as in the paper on Switch Transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the model. ``choices`` is the number of experts of each token, 1 or 2."""

    vocabulary: int = 64
    sequence: int = 32  # tokens
    width: int = 32
    heads: int = 4
    blocks: int = 4
    experts: int = 4
    choices: int = 2
    room: float = 1.25  # places of the experts over the choices of all tokens

    @property
    def places(self) -> int:
        """Return the number of tokens of a sequence that an expert takes."""
        return int(np.ceil(self.room * self.choices * self.sequence / self.experts))


def build_model(sizes: Sizes) -> Model:
    """Return the layers. Values between them are tokens, and the balance loss of each sample."""

    def init_embedding(key: jax.Array) -> dict[str, jax.Array]:
        token_key, place_key = jax.random.split(key)
        return {
            "tokens": 0.02 * jax.random.normal(token_key, (sizes.vocabulary, sizes.width)),
            "positions": 0.02 * jax.random.normal(place_key, (sizes.sequence, sizes.width)),
        }

    def embed(params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
        return {"x": x, "balance": jnp.zeros(len(tokens))}

    def init_block(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 5)
        width, size = sizes.width, sizes.width // sizes.heads
        return {
            "qkv": init_kernel(keys[0], (width, 3, sizes.heads, size), width),
            "out": init_kernel(keys[1], (sizes.heads, size, width), width),
            "router": init_kernel(keys[2], (width, sizes.experts), width),
            "up": init_kernel(keys[3], (sizes.experts, width, 4 * width), width),
            "down": init_kernel(keys[4], (sizes.experts, 4 * width, width), 4 * width),
            "attention_scale": jnp.ones(width),
            "expert_scale": jnp.ones(width),
        }

    def apply_block(params: Any, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        x = values["x"]
        x = x + attend(params, normalize(x) * params["attention_scale"])
        mixed, balance = mix_experts(params, normalize(x) * params["expert_scale"], sizes)
        return {"x": x + mixed, "balance": values["balance"] + balance / sizes.blocks}

    def init_head(key: jax.Array) -> dict[str, jax.Array]:
        return {"logits": init_kernel(key, (sizes.width, sizes.vocabulary), sizes.width)}

    def apply_head(params: Any, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"logits": normalize(values["x"]) @ params["logits"], "balance": values["balance"]}

    blocks = [
        Layer(name=f"block_{index}", init=init_block, apply=apply_block, divisions=BLOCK_DIVISIONS)
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
        divisions={"logits": PartitionSpec(None, TENSOR)},
    )
    return Model(layers=(embedding, *blocks, head), loss=measure_loss, sequence_axis=1)


BLOCK_DIVISIONS: Final = {
    "qkv": PartitionSpec(None, None, TENSOR),
    "out": PartitionSpec(TENSOR),
    "up": PartitionSpec(EXPERT, None, TENSOR),
    "down": PartitionSpec(EXPERT, TENSOR),
}
"""Experts are divided among devices, and heads and hidden values of each expert may be, too."""


def init_kernel(key: jax.Array, shape: tuple[int, ...], inputs: int) -> jax.Array:
    """Return a kernel whose outputs have about the variance of its inputs."""
    return jax.random.normal(key, shape) / np.sqrt(inputs)


def normalize(x: jax.Array) -> jax.Array:
    """Return ``x`` with a mean square of 1 along its last axis."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-5)


def attend(params: Any, x: jax.Array) -> jax.Array:
    """Return what each token gathers from itself and from earlier tokens."""
    queries, keys, values = jnp.einsum("bsw,wnhd->nbshd", x, params["qkv"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / np.sqrt(queries.shape[-1])
    is_seen = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    shares = jax.nn.softmax(jnp.where(is_seen, scores, -1e9), axis=-1)
    return jnp.einsum("bqhd,hdw->bqw", jnp.einsum("bhqk,bkhd->bqhd", shares, values), params["out"])


def mix_experts(params: Any, x: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Return what the experts make of the tokens, and the balance loss of each sample.

    The devices of each expert get its tokens (``constrain``), and give them back afterwards.
    """
    chances = jax.nn.softmax((x @ params["router"]).astype(jnp.float32), axis=-1)
    places, weights = route(chances, sizes)
    inputs = jnp.einsum("bsep,bsw->ebpw", places.astype(x.dtype), x)
    inputs = constrain(inputs, EXPERT, "data")
    hidden = jax.nn.gelu(jnp.einsum("ebpw,ewf->ebpf", inputs, params["up"]))
    outputs = constrain(jnp.einsum("ebpf,efw->ebpw", hidden, params["down"]), EXPERT, "data")
    mixed = jnp.einsum("bsep,ebpw->bsw", weights.astype(x.dtype), outputs)
    used = places.sum(axis=(1, 3)) / places.sum(axis=(1, 2, 3))[:, None]
    balance = sizes.experts * (used * chances.mean(axis=1)).sum(axis=-1)
    return constrain(mixed, "data"), balance


def route(chances: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Return the places of tokens at experts, as 0 or 1, and with the weights of their outputs.

    Both have the shape [samples, tokens, experts, places]. Earlier tokens of a sequence are served
    first. Tokens that find no place pass the experts by.
    """
    weights, experts = jax.lax.top_k(chances, sizes.choices)
    if sizes.choices > 1:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    chosen = jax.nn.one_hot(experts, sizes.experts, dtype=jnp.int32)  # [b, s, choices, experts]
    samples, tokens = experts.shape[:2]
    flat = chosen.reshape(samples, tokens * sizes.choices, sizes.experts)
    queue = (jnp.cumsum(flat, axis=1) - 1).reshape(chosen.shape)
    place = jnp.where(chosen > 0, queue, sizes.places)  # no place is a row of zeros
    taken = jax.nn.one_hot(place, sizes.places, dtype=weights.dtype)
    return taken.sum(axis=2), jnp.einsum("bsc,bscep->bsep", weights, taken)


def measure_loss(values: dict[str, jax.Array], targets: jax.Array) -> jax.Array:
    """Return the mean cross entropy of the next tokens, and a share of the balance loss."""
    logits = values["logits"].astype(jnp.float32)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return entropy + BALANCE_WEIGHT * values["balance"].mean()


def load_tokens(seed: int, sample: int, sizes: Sizes) -> np.ndarray:
    """Return a sample: tokens that advance by a constant step, which the model has to find out."""
    generator = np.random.default_rng((seed, sample))
    start, step = generator.integers(sizes.vocabulary), generator.integers(1, 9)
    return (start + step * np.arange(sizes.sequence + 1, dtype=np.int32)) % sizes.vocabulary


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
    parser.add_argument("--folder", default="train_jax_moe", help="if Tessera gives none")
    parser.add_argument("--precision", default="f32", choices=("f32", "bf16", "plan"))
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6, help="with the embedding and the head")
    parser.add_argument("--experts", type=int, default=4, help="experts of each block")
    parser.add_argument("--choices", type=int, default=2, help="experts of each token")
    parser.add_argument("--pause-s", type=float, default=0.0, help="waits, for demonstrations")
    parser.add_argument("--work-s", type=float, default=0.0, help="waits that the GPUs share")
    return parser.parse_args()


def main() -> None:
    """Train from the last checkpoint to the last iteration, or until a stop is requested."""
    options = read_options()
    sizes = Sizes(
        width=options.width,
        blocks=options.layers - 2,
        experts=options.experts,
        choices=options.choices,
    )

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
