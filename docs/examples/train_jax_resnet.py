"""A small Wide-ResNet in JAX that trains under any execution plan of Tessera.

Submit it with the runtime jax, or try it alone with ``python train_jax_resnet.py --iterations 50``.
Statistics of a batch would depend on how a plan divides it. So layers use those of fixed groups of
consecutive samples (ghost batches), which the model states as ``mixed_samples``. Each micro-batch
has whole groups. ``--group 1`` uses the statistics of each sample alone.

The activation is smooth (SiLU). At the kink of ReLU, rounding errors decide whether a gradient is
there, so two plans would drift apart after some dozens of steps, as would two orders of summation.

Samples are images of shapes in noise, made from a seed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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
COLOURS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the model. The second half of the blocks has twice the width."""

    width: int = 16  # channels
    blocks: int = 4
    group: int = 4  # samples that share the statistics of their channels
    classes: int = 8
    pixels: int = 8  # of a side of an image


def build_model(sizes: Sizes) -> Model:
    """Return the layers: a first convolution, blocks, and a head."""

    def init_stem(key: jax.Array) -> dict[str, jax.Array]:
        return {"kernel": init_kernel(key, COLOURS, sizes.width)}

    def apply_stem(params: Any, images: jax.Array) -> jax.Array:
        return convolve(images, params["kernel"])

    def init_head(key: jax.Array) -> dict[str, Any]:
        width = 2 * sizes.width
        kernel = jax.random.normal(key, (width, sizes.classes)) / np.sqrt(width)
        return {"norm": init_norm(width), "kernel": kernel, "bias": jnp.zeros(sizes.classes)}

    def apply_head(params: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.silu(normalize(params["norm"], x, sizes.group))
        return x.mean(axis=(1, 2)) @ params["kernel"] + params["bias"]

    layers = [Layer(name="stem", init=init_stem, apply=apply_stem)]
    channels = sizes.width
    for index in range(sizes.blocks):
        is_second_half = index >= sizes.blocks // 2
        outputs = 2 * sizes.width if is_second_half else sizes.width
        init_block, apply_block = block_functions(channels, outputs, sizes.group)
        layers.append(
            Layer(
                name=f"block_{index}",
                init=init_block,
                apply=apply_block,
                divisions=BLOCK_DIVISIONS,
            )
        )
        channels = outputs
    layers.append(Layer(name="head", init=init_head, apply=apply_head))
    return Model(layers=tuple(layers), loss=measure_loss, mixed_samples=sizes.group)


BLOCK_DIVISIONS: Final = {
    "first": PartitionSpec(None, None, None, TENSOR),
    "second_norm/scale": PartitionSpec(TENSOR),
    "second_norm/bias": PartitionSpec(TENSOR),
    "second": PartitionSpec(None, None, TENSOR),
}
"""The channels between the two convolutions of a block are divided."""


@cache
def block_functions(
    inputs: int, outputs: int, group: int
) -> tuple[Callable[[jax.Array], Any], Callable[[Any, jax.Array], jax.Array]]:
    """Return how a block begins, and how it is applied. Blocks of the same sizes share both.

    A block with more outputs than inputs also halves the sides of the images.
    """
    stride = 1 if inputs == outputs else 2

    def init_block(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 3)
        params = {
            "first_norm": init_norm(inputs),
            "first": init_kernel(keys[0], inputs, outputs),
            "second_norm": init_norm(outputs),
            "second": init_kernel(keys[1], outputs, outputs),
        }
        if inputs != outputs:
            params["shortcut"] = jax.random.normal(keys[2], (1, 1, inputs, outputs)) / inputs**0.5
        return params

    def apply_block(params: Any, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(normalize(params["first_norm"], x, group))
        shortcut = convolve(hidden, params["shortcut"], stride) if inputs != outputs else x
        hidden = convolve(hidden, params["first"], stride)
        hidden = jax.nn.silu(normalize(params["second_norm"], hidden, group))
        return shortcut + convolve(hidden, params["second"])

    return init_block, apply_block


def init_norm(channels: int) -> dict[str, jax.Array]:
    """Return the parameters of a normalization."""
    return {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}


def init_kernel(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
    """Return a kernel of 3 x 3 whose outputs keep the variance through a ReLU."""
    return jax.random.normal(key, (3, 3, inputs, outputs)) * np.sqrt(2 / (9 * inputs))


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Return the convolution of images [samples, height, width, channels]."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def normalize(params: Any, x: jax.Array, group: int) -> jax.Array:
    """Return ``x`` with mean 0 and variance 1 in each channel of each group of samples."""
    groups = x.reshape(-1, group, *x.shape[1:])
    centred = groups - groups.mean(axis=(1, 2, 3), keepdims=True)
    variance = jnp.square(centred).mean(axis=(1, 2, 3), keepdims=True)
    scaled = (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return scaled * params["scale"] + params["bias"]


def measure_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean cross entropy of the classes."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def load_image(seed: int, sample: int, sizes: Sizes) -> tuple[np.ndarray, int]:
    """Return an image [height, width, colours] and its class: stripes of 4 slopes, in several widths."""
    generator = np.random.default_rng((seed, sample))
    kind = int(generator.integers(sizes.classes))
    angle, waves = np.pi * (kind % 4) / 4, 1 + kind // 4
    rows, columns = np.mgrid[: sizes.pixels, : sizes.pixels] / sizes.pixels
    along = rows * np.sin(angle) + columns * np.cos(angle)
    stripes = np.sin(2 * np.pi * waves * along + generator.uniform(0, 2 * np.pi))
    colour = generator.uniform(0.5, 1.0, COLOURS)
    noise = generator.normal(0, 1, (sizes.pixels, sizes.pixels, COLOURS))
    return (stripes[..., None] * colour + noise).astype(np.float32), kind


def load_batch(seed: int, samples: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return images [samples, height, width, colours] and their classes [samples]."""
    images, kinds = zip(*(load_image(seed, int(sample), sizes) for sample in samples), strict=True)
    return np.stack(images), np.array(kinds, dtype=np.int32)


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Return the optimizer. Adam would magnify differences of gradients that are nearly 0."""
    return optax.sgd(learning_rate, momentum=0.9, nesterov=True)


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=100, help="if Tessera gives no number")
    parser.add_argument("--batch", type=int, default=16, help="if Tessera gives no global batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=20, help="iterations between checkpoints")
    parser.add_argument("--folder", default="train_jax_resnet", help="if Tessera gives none")
    parser.add_argument("--precision", default="f32", choices=("f32", "bf16", "plan"))
    parser.add_argument("--width", type=int, default=16, help="channels of the first half")
    parser.add_argument("--layers", type=int, default=6, help="with the stem and the head")
    parser.add_argument("--group", type=int, default=4, help="samples that share statistics")
    parser.add_argument("--pause-s", type=float, default=0.0, help="waits, for demonstrations")
    parser.add_argument("--work-s", type=float, default=0.0, help="waits that the GPUs share")
    return parser.parse_args()


def main() -> None:
    """Train from the last checkpoint to the last iteration, or until a stop is requested."""
    options = read_options()
    sizes = Sizes(width=options.width, blocks=options.layers - 2, group=options.group)

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
