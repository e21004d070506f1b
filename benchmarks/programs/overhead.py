"""A program that trains a GPT by ``tessera.jax`` and by a plain JAX program, and compares CPU times.

It reads the sizes of the model and the plain program's degrees from its input, as JSON. The plan of
``tessera.jax`` is that of TESSERA_PLAN_FILE, as for any job. It prints a JSON object: the CPU
seconds of an iteration by each, for each pair of blocks of iterations.

Blocks of both alternate in one process: A B, B A, A B, ... So whatever slows the machine down slows
both down.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from tessera.jax import Training, train

SEED = 1
LEARNING_RATE = 1e-3

PLAIN_DIVISIONS = {
    "tokens": Spec("tensor"),
    "qkv/kernel": Spec(None, None, "tensor"),
    "qkv/bias": Spec(None, "tensor"),
    "out/kernel": Spec("tensor"),
    "up/kernel": Spec(None, "tensor"),
    "up/bias": Spec("tensor"),
    "down/kernel": Spec("tensor"),
    "logits/kernel": Spec(None, "tensor"),
    "logits/bias": Spec("tensor"),
}


class PlainProgram:
    """A training step as one writes it by hand in JAX, on a mesh of replicas and their parts."""

    def __init__(self, example: Any, wanted: Mapping[str, Any]) -> None:
        """Place the parameters. The step is compiled when it first runs."""
        self._example, self._sizes = example, example.Sizes(**wanted["sizes"])
        self._batch, self._parts = int(wanted["batch"]), int(wanted["micro_batches"])
        model = example.build_model(self._sizes)
        dp, tp = int(wanted["dp"]), int(wanted["tp"])
        devices = np.array(jax.devices()[: dp * tp]).reshape(dp, tp)
        self._mesh = Mesh(devices, ("data", "tensor"))
        keys = jax.random.split(jax.random.key(SEED), len(model.layers))
        params = [layer.init(key) for layer, key in zip(model.layers, keys, strict=True)]
        places = jax.tree_util.tree_map_with_path(self._place, params)
        self._params = jax.device_put(params, places)
        self._optimizer = optax.adamw(LEARNING_RATE)
        self._state = jax.jit(self._optimizer.init)(self._params)
        self._samples = NamedSharding(self._mesh, Spec(None, "data"))
        self._iteration = 0

        def find_loss(params: Any, inputs: Any, targets: Any) -> Any:
            values = inputs
            for layer, own in zip(model.layers, params, strict=True):
                values = layer.apply(own, values)
            return model.loss(values, targets)

        self._step = jax.jit(self._make_step(find_loss), donate_argnums=(0, 1))

    def _place(self, path: Any, _: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        return NamedSharding(self._mesh, PLAIN_DIVISIONS.get(name, Spec()))

    def _make_step(self, find_loss: Callable[..., Any]) -> Callable[..., Any]:
        def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
            if self._parts == 1:
                loss, grads = jax.value_and_grad(find_loss)(params, inputs[0], targets[0])
            else:

                def add(sums: Any, part: Any) -> Any:
                    found = jax.value_and_grad(find_loss)(params, *part)
                    return jax.tree.map(jax.numpy.add, sums, found), None

                zeros = jax.tree.map(jax.numpy.zeros_like, params)
                sums, _ = jax.lax.scan(add, (0.0, zeros), (inputs, targets))
                loss, grads = jax.tree.map(lambda leaf: leaf / self._parts, sums)
            updates, state = self._optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        return step

    def run_iteration(self) -> float:
        """Train an iteration, and return its loss."""
        first = self._iteration * self._batch
        samples = np.arange(first, first + self._batch) % self._example.TRAIN_SAMPLES
        batch = self._example.load_batch(SEED, samples, self._sizes)
        inputs, targets = (
            jax.device_put(part.reshape(self._parts, -1, *part.shape[1:]), self._samples)
            for part in batch
        )
        self._params, self._state, loss = self._step(self._params, self._state, inputs, targets)
        self._iteration += 1
        return float(loss)


class Comparison:
    """The CPU seconds of alternating blocks. ``note`` is called after each iteration of Tessera."""

    def __init__(self, plain: PlainProgram, pairs: int, length: int, warm_up: int) -> None:
        """Prepare ``pairs`` pairs of blocks of ``length`` iterations, after a warm-up."""
        self._plain, self._pairs, self._length, self._warm_up = plain, pairs, length, warm_up
        self.tessera_s = list[float]()
        self.plain_s = list[float]()
        self._begun_s = 0.0

    @property
    def iterations(self) -> int:
        """Return the iterations that Tessera trains."""
        return self._warm_up + self._pairs * self._length

    def note(self, training: Training, _loss: float) -> None:
        """End a block of Tessera if this is its last iteration, and run blocks of the other."""
        done = training.iterations - self._warm_up
        if done == 0:
            for _ in range(self._warm_up):
                self._plain.run_iteration()
        elif done > 0 and done % self._length == 0:
            self.tessera_s.append((time.process_time() - self._begun_s) / self._length)
            if len(self.tessera_s) > len(self.plain_s):
                self._run_plain()
            is_plain_first = len(self.tessera_s) % 2 == 1 and len(self.plain_s) < self._pairs
            if is_plain_first:
                self._run_plain()
        else:
            return
        self._begun_s = time.process_time()

    def _run_plain(self) -> None:
        begun_s = time.process_time()
        for _ in range(self._length):
            loss = self._plain.run_iteration()
            sys.stderr.write(f"iteration loss {loss:.6f}\n")  # as any program does
        self.plain_s.append((time.process_time() - begun_s) / self._length)


def main() -> None:
    """Compare the two programs."""
    wanted = json.load(sys.stdin)
    example = importlib.import_module("train_jax_gpt")
    sizes = example.Sizes(**wanted["sizes"])
    plain = PlainProgram(example, wanted)
    comparison = Comparison(plain, wanted["pairs"], wanted["length"], wanted["warm_up"])
    train(
        example.build_model(sizes),
        example.make_optimizer(LEARNING_RATE),
        load=lambda samples: example.load_batch(SEED, samples, sizes),
        samples=example.TRAIN_SAMPLES,
        iterations=comparison.iterations,
        batch=wanted["batch"],
        seed=SEED,
        every=10**9,
        on_iteration=comparison.note,
    )
    measured = {"tessera_s": comparison.tessera_s, "plain_s": comparison.plain_s}
    sys.stdout.write(f"{json.dumps(measured)}\n")


if __name__ == "__main__":
    main()
