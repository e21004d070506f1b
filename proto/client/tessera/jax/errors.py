"""Errors of training programs: each is one sentence that says what to do."""

from __future__ import annotations


class TrainingError(Exception):
    """The base of all errors that this package raises on purpose.

    * PlanRefused: the execution plan does not fit the model, the batch or the devices.
    * ModelRefused: the model cannot be trained: a function has side effects, or a name is used twice.
    * CheckpointRefused: the checkpoint is incomplete, or of another model.
    * LossNotFinite: the loss is not a number.
    """


class PlanRefused(TrainingError):
    """An error for a plan that the model, the batch or the devices do not fit."""


class ModelRefused(TrainingError):
    """An error for a model that cannot be trained."""


class CheckpointRefused(TrainingError):
    """An error for a checkpoint that is incomplete or of another model."""


class LossNotFinite(TrainingError):
    """An error for a loss that is infinite or not a number."""
