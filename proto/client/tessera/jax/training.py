"""The loop of a training program: it goes on from checkpoints, reports, and stops when asked."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import jax
import optax

from tessera import progress
from tessera.jax.build import build_engine
from tessera.jax.checkpoints import has_finite_parameters, load_checkpoint, save_checkpoint
from tessera.jax.errors import (
    CheckpointRefused,
    LossNotFinite,
    ModelRefused,
    PlanRefused,
    TrainingError,
)
from tessera.jax.hosts import RequestExchange, is_any_host, is_first_host, prepare_devices
from tessera.jax.models import Model, Values
from tessera.jax.plans import current_plan, read_plan, set_precision
from tessera.jax.purity import check_model
from tessera.jax.samples import Ints, SampleOrder
from tessera.jax.tuning import tune
from tessera.plans import ExecutionPlan

if TYPE_CHECKING:
    from tessera.jax.engines import Engine, TrainState

Loader = Callable[[Ints], tuple[Values, Values]]
"""A function from samples, of shape (n,), to their inputs and targets: arrays of n rows."""

_REASONS: Final[dict[type[TrainingError], str]] = {
    PlanRefused: "refused",
    ModelRefused: "refused",
    CheckpointRefused: "bad_checkpoint",
    LossNotFinite: "loss_not_finite",
}
"""What the scheduler is told for each error. All others are plain errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training data: ``samples`` samples, and the function that loads some of them."""

    load: Loader
    samples: int


class Training:
    """A model in training under the plan of this start, for programs with a loop of their own.

    ``iterations`` is the number of iterations done. On several hosts, all hosts call all methods, in
    the same order.
    """

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        data: Data,
        *,
        batch: int,
        seed: int = 1,
        precision: str | None = None,
        clip_norm: float | None = None,
        plan: ExecutionPlan | None = None,
    ) -> None:
        """Read the plan and the checkpoint of this start, and place the state accordingly.

        If the job asks for it, plans are tried first, and the fastest is used.

        ``batch`` is the global batch where Tessera gives none, and ``plan`` likewise. ``precision``
        replaces that of the plan.

        Raises:
            PlanRefused: the plan cannot be run by this model or on these devices.
            ModelRefused: a function has side effects, or does not fit the others.
            CheckpointRefused: the checkpoint is damaged, or of another model.
            HostsMissing: the hosts of the job did not meet.
        """
        prepare_devices()
        devices = jax.devices()
        batch = progress.global_batch(default=batch)
        chosen = set_precision(
            current_plan(len(model.layers), len(devices), batch, default=plan), precision
        )
        model.check_plan(chosen, len(devices), batch)
        self._data, self._seed = data, seed
        self._order = SampleOrder(samples=data.samples, batch=batch, seed=seed)
        inputs, targets = data.load(self._order.samples_of(0)[: chosen.micro_batch])
        check_model(model, inputs, targets)

        def make_engine(tried: ExecutionPlan) -> Engine:
            tried = set_precision(tried, precision)
            return build_engine(model, optimizer, tried, devices, seed=seed, clip_norm=clip_norm)

        tuned = tune(make_engine, lambda: data.load(self._order.samples_of(0)), seed)
        self.engine: Engine = make_engine(read_plan(tuned) if tuned else chosen)
        self.iterations = 0
        self._saved_iterations = -1
        self.state: TrainState = self._first_state()

    @property
    def plan(self) -> ExecutionPlan:
        """Return the plan that runs."""
        return self.engine.plan

    def next_samples(self) -> Ints:
        """Return the samples of the next iteration, of shape (global batch,)."""
        return self._order.samples_of(self.iterations)

    def step(self) -> jax.Array:
        """Train an iteration. Return the mean loss, a scalar that may still be computed."""
        inputs, targets = self._data.load(self.next_samples())
        self.state, loss = self.engine.run_iteration(self.state, inputs, targets, self.iterations)
        self.iterations += 1
        return loss

    def evaluate(self, samples: Ints) -> float:
        """Return the mean loss of a global batch of samples, without training."""
        return float(self.engine.evaluate(self.state, *self._data.load(samples)))

    def save(self) -> None:
        """Write a checkpoint and report it, unless this iteration has one.

        Raises:
            LossNotFinite: a parameter is not a number, so the earlier checkpoint stays the last one.
            OSError: it cannot be written.
        """
        if self.iterations == self._saved_iterations:
            return
        if is_any_host(not has_finite_parameters(self.state)):
            raise LossNotFinite(
                f"parameters are not finite after iteration {self.iterations}, so no checkpoint was"
                " written; lower the learning rate, or set clip_norm"
            )
        path = progress.checkpoint_path(self.iterations)
        save_checkpoint(path, self.state, self.iterations, self._seed)
        progress.report_checkpoint(self.iterations, path)
        self._saved_iterations = self.iterations

    def _first_state(self) -> TrainState:
        path = progress.resume_path()
        if path is None:
            return self.engine.initial_state(self._seed)
        self.iterations = self._saved_iterations = progress.resume_iterations()
        return load_checkpoint(path, self.engine, self.iterations, self._seed)


def train(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    load: Loader,
    samples: int,
    iterations: int,
    batch: int,
    seed: int = 1,
    every: int = 100,
    precision: str | None = None,
    clip_norm: float | None = None,
    stop_if_not_finite: bool = True,
    ledger: Path | None = None,
    on_iteration: Callable[[Training, float], None] | None = None,
) -> None:
    """Train a model from its last checkpoint to its last iteration, or until a stop is requested.

    ``load(samples)`` returns the inputs and targets of samples, whose numbers are 0 to ``samples -
    1``. ``iterations`` and ``batch`` hold where Tessera gives no others. A checkpoint is written
    each ``every`` iterations, when it is asked for, and at a stop. ``precision`` ("f32" or "bf16")
    replaces that of the plan. With ``clip_norm``, the norm of all gradients together is at most that.

    If ``stop_if_not_finite``, a loss that is infinite or not a number ends the job, and Tessera does
    not try it again. A checkpoint is only written once the losses before it are known to be finite.
    In any case, a checkpoint never holds parameters that are not finite.

    ``ledger`` is a directory to which the samples of each iteration are written, for proofs.
    ``on_iteration(training, loss)`` is called after each iteration.

    Errors of the model, the plan or the checkpoint end the program with one sentence and status 1.
    """
    progress.catch_stop()
    try:
        training = Training(
            model,
            optimizer,
            Data(load=load, samples=samples),
            batch=batch,
            seed=seed,
            precision=precision,
            clip_norm=clip_norm,
        )
        total = progress.iterations_total(default=iterations)
        with _Journal(ledger, stop_if_not_finite) as journal:
            _run(training, total, every, journal, on_iteration)
    except TrainingError as error:
        reason = next((name for kind, name in _REASONS.items() if isinstance(error, kind)), "error")
        progress.fail(reason, str(error))


def _run(
    training: Training,
    total: int,
    every: int,
    journal: _Journal,
    on_iteration: Callable[[Training, float], None] | None,
) -> None:
    """Train until the end or a stop. While an iteration runs, the one before it is recorded."""
    requests, is_stopping = RequestExchange(), is_any_host(progress.stop_requested())
    while training.iterations < total and not is_stopping:
        samples = training.next_samples()
        loss = training.step()
        done = training.iterations
        wants_checkpoint, is_stopping = requests.take(
            done, progress.checkpoint_requested(), progress.stop_requested()
        )
        is_last = is_stopping or done == total
        journal.note(done, samples, loss)
        if on_iteration or wants_checkpoint or is_last or done % every == 0:
            value = journal.settle()
            if on_iteration:
                on_iteration(training, value)
        if wants_checkpoint or is_last or done % every == 0:
            _save(training, journal.stops_if_not_finite)


def _save(training: Training, stop_if_not_finite: bool) -> None:
    """Write a checkpoint, or keep the earlier one if parameters are not finite.

    Raises:
        LossNotFinite: parameters are not finite, and this ends the job.
        TrainingError: the checkpoint cannot be written.
    """
    try:
        training.save()
    except OSError as error:
        raise TrainingError(
            f"the checkpoint of iteration {training.iterations} cannot be written: {error}"
        ) from error
    except LossNotFinite as error:
        if stop_if_not_finite:
            raise
        sys.stderr.write(f"warning: {error}\n")
        sys.stderr.flush()


class _Journal:
    """What is known of iterations: the newest one may still run, and those before are recorded."""

    def __init__(self, folder: Path | None, stops_if_not_finite: bool) -> None:
        self.stops_if_not_finite = stops_if_not_finite
        self._waiting: tuple[int, Ints, jax.Array] | None = None
        self._ledger: TextIO | None = None
        if folder is not None and is_first_host():
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{os.environ.get('TESSERA_GENERATION', '0')}-0.jsonl"
            self._ledger = (folder / name).open("a", encoding="utf-8")

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._ledger is not None:
            self._ledger.close()

    def note(self, done: int, samples: Ints, loss: jax.Array) -> None:
        """Note an iteration that was begun, and record the one before."""
        self.settle()
        self._waiting = done, samples, loss

    def settle(self) -> float:
        """Record the iteration that was begun, once its loss is there. Return its loss.

        Raises:
            LossNotFinite: it is not finite, and this ends the job.
        """
        if self._waiting is None:
            return math.nan
        (done, samples, array), self._waiting = self._waiting, None
        loss = float(array)
        if is_first_host():
            progress.report(done, loss=loss, memory_bytes=_peak_memory())
            sys.stdout.write(f"iteration {done} loss {loss:.6f}\n")
            sys.stdout.flush()
        if self._ledger is not None:
            line = {"iteration": done - 1, "samples": samples.tolist(), "loss": loss}
            self._ledger.write(json.dumps(line) + "\n")
            self._ledger.flush()
        if self.stops_if_not_finite and not math.isfinite(loss):
            raise LossNotFinite(
                f"the loss of iteration {done} is {loss}; lower the learning rate, set clip_norm, or"
                " go on by stop_if_not_finite=False"
            )
        return loss


def _peak_memory() -> int | None:
    """Return the largest number of bytes that a device here has held, or None if it is unknown."""
    peaks = [
        stats["peak_bytes_in_use"]
        for device in jax.local_devices()
        if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats
    ]
    return max(peaks, default=None)
