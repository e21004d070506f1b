"""The models of workloads in the form of the estimator: users' own and published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tessera.estimator.architectures import files
from tessera.estimator.architectures.published import published_models
from tessera.estimator.graph import Graph
from tessera.estimator.memory import parameter_bytes
from tessera.estimator.plans import Training
from tessera.estimator.profiling.tasks import Profile, profiles_of, step_of
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput, TesseraError
from tessera.formulation.base.values import Workload
from tessera.formulation.records.estimates import ModelSpec, ProfileRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A model in the form of the estimator, with its training."""

    graph: Graph
    training: Training  # at an arbitrary batch
    zero: int
    profiles: Mapping[str, Profile] = field(default_factory=dict)  # by GPU type


def read_model(
    field: str, spec: ModelSpec, cancelled: Callable[[], bool] = never_cancelled
) -> Model:
    """Return the model that a user's specification describes.

    Raises:
        InvalidInput: the architecture is not valid, or its training is impossible; names the field.
        DeadlineTooShort: it was cancelled.
    """
    values = files.read_values(f"{field}.architecture", spec.architecture, cancelled)
    try:
        architecture = files.parse_architecture(
            values,
            name=f"{spec.model} {spec.params}".strip(),
            sequence=spec.sequence or None,
            dtype=spec.dtype or None,
            flash=spec.flash,
        )
        graph = files.architecture_graph(architecture)
    except InvalidInput as wrong:
        place = f"{field}.architecture" + (f".{wrong.field}" if wrong.field else "")
        raise InvalidInput(place, wrong.problem) from wrong
    except TesseraError as wrong:
        raise InvalidInput(f"{field}.architecture", str(wrong)) from wrong
    training = Training(
        global_batch=spec.micro_batches,
        micro_batches=spec.micro_batches,
        state_bytes=spec.state_bytes,
        checkpointing=spec.checkpointing,
    )
    try:
        parameter_bytes(graph, training)
    except TesseraError as wrong:
        raise InvalidInput(f"{field}.state_bytes", str(wrong)) from wrong
    return Model(graph=graph, training=training, zero=spec.zero)


def model_of(
    field: str, workload: Workload, own: Iterable[ModelSpec], measured: Sequence[ProfileRow] = ()
) -> Model:
    """Return the model of a workload: a user's own, or else a published one of that name.

    ``measured`` are layers of any models. Those that belong to the model's step become its
    profiles.

    Raises:
        InvalidInput: there is no such model; the message says what to do.
    """
    specs = tuple(own)
    model = _model_named(field, workload, specs)
    if not measured:
        return model
    step = step_of(workload, specs)
    return replace(model, profiles=profiles_of(measured, workload, step, model.graph.dtype))


def _model_named(field: str, workload: Workload, own: Iterable[ModelSpec]) -> Model:
    key = (workload.model, workload.params)
    for spec in own:
        if (spec.model, spec.params) == key:
            return read_model(field, spec)
    published = published_models().get(key)
    if published is None:
        raise InvalidInput(field, "; ".join(unknown_model(workload)))
    return Model(graph=published.graph, training=published.training, zero=published.zero)


def known_models(
    workloads: Iterable[Workload], own: Iterable[ModelSpec], measured: Sequence[ProfileRow] = ()
) -> dict[Workload, Model]:
    """Return the models of those workloads whose model is known.

    ``measured`` is as in ``model_of``.
    """
    specs, models = tuple(own), {}
    names = {(spec.model, spec.params) for spec in specs} | published_models().keys()
    for workload in dict.fromkeys(workloads):
        if (workload.model, workload.params) in names:
            models[workload] = model_of("", workload, specs, measured)
    return models


def unknown_model(workload: Workload) -> tuple[str, str]:
    """Return the message that a model is unknown, and the remedy."""
    sizes = ", ".join(params for model, params in published_models() if model == workload.model)
    near = f" (published sizes of {workload.model}: {sizes})" if sizes else ""
    return (
        f"the model {workload.model} {workload.params}".rstrip() + f" is unknown{near}",
        "describe it with `tessera models add` (Estimates.UpsertModels), or import a profile of it",
    )
