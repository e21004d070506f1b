"""The options that describe a model and its training, and the model that they result in."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from tessera.estimator.architectures import files
from tessera.estimator.architectures.published import find_published, published_models
from tessera.estimator.exporting.graphs import export_graph
from tessera.estimator.graph import DTYPE_BYTES, Graph
from tessera.estimator.memory import States
from tessera.estimator.plan_search import FixedChoices
from tessera.estimator.plans import Training
from tessera.estimator.profiling.tasks import ArgumentValue, StepTarget, step_of, value_of
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.release import install_hint
from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import Recomputation, ZeroStage
from tessera.service.cli import options
from tessera.service.cli.client import CallFailed, Exit

DEFAULT_MICRO_BATCHES: Final = 16
_NOT_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")

_Command = TypeVar("_Command", bound=Callable[..., None])


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel:
    """A model and its training.

    ``step`` is a training step in JAX with the graph's data type, or None. ``choices`` are what the
    user stated of plans, or None.
    """

    name: str
    params: str
    graph: Graph
    training: Training
    states: States
    step: StepTarget | None = None
    choices: FixedChoices | None = None


def _option(text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **rest)


def _training(text: str, *names: str, **rest: Any) -> Any:
    return _option(text, *names, rich_help_panel="Training", **rest)


def model_options(
    *,
    batch: Annotated[int, _option("Global batch size, in samples.", min=1, max=limits.MAX_BATCH)],
    model: Annotated[
        str,
        _option(
            "One of the papers' models; `bert` alone lists its sizes. With --architecture, --hf, --step or"
            " --torch: a name for that model.",
            "--model",
            "-m",
            metavar="NAME[/PARAMS]",
        ),
    ] = "",
    architecture: Annotated[
        Path | None,
        _option(
            "Description of the architecture (layers, hidden size, heads ...) in YAML or JSON.",
            metavar="FILE",
        ),
    ] = None,
    hf: Annotated[
        Path | None, _option("Configuration of a Hugging Face model.", metavar="config.json")
    ] = None,
    step: Annotated[
        str,
        _option("Training step in JAX. Needs the extra `estimator`.", metavar="MODULE:FUNCTION"),
    ] = "",
    torch: Annotated[
        str,
        _option(
            "PyTorch module with example arguments. Needs the extra `torch`.",
            metavar="MODULE:FUNCTION",
        ),
    ] = "",
    argument: Annotated[
        list[str] | None,
        _option("Argument of the function of --step or --torch. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    sequence: Annotated[
        int | None, _training("Tokens of a sample. Default: the file's.", min=1)
    ] = None,
    dtype: Annotated[
        str | None,
        _training(f"Data type of compute: {', '.join(DTYPE_BYTES)}. Default: the model's."),
    ] = None,
    flash: Annotated[
        bool,
        _training(
            "Use attention that stores no scores (only with --architecture or --hf).", "--flash"
        ),
    ] = False,
    micro_batches: Annotated[
        int | None,
        _training(
            "Micro-batches of an iteration. Default: the best number.",
            min=1,
            max=limits.MAX_BATCH,
        ),
    ] = None,
    checkpointing: Annotated[
        bool | None,
        _training(
            "Recompute activations instead of keeping them. Default: whatever is best.",
            "--checkpointing/--no-checkpointing",
        ),
    ] = None,
    zero: Annotated[
        int | None, _training("ZeRO stage. Default: the best one.", min=0, max=3)
    ] = None,
    state_bytes: Annotated[
        float | None,
        _training(
            "Bytes of a parameter with its gradient and optimizer state. Default: the model's, or 16, as for"
            " Adam.",
            min=1.0,
            max=64.0,
        ),
    ] = None,
) -> DescribedModel:
    """Return the model that the options describe. Raises InvalidInput."""
    models = {"--architecture": architecture, "--hf": hf, "--step": step, "--torch": torch}
    given = [name for name, value in models.items() if value]
    if len(given) > 1:
        raise InvalidInput(", ".join(given), "describe different models; give only one of them")
    if argument and not (step or torch):
        raise InvalidInput("--argument", "needs --step or --torch")
    if dtype is not None and dtype not in DTYPE_BYTES:
        raise InvalidInput("--dtype", f"must be one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    file = architecture or hf
    if file is None and (flash or (sequence is not None)):
        raise InvalidInput("--sequence, --flash", "need --architecture or --hf")
    if file is not None:
        graph = files.load_graph(file, sequence=sequence, dtype=dtype, flash=flash)
    elif step:
        graph = trace_graph(step, step_arguments(argument))
    elif torch:
        _require_modules("torch", extra="torch")
        graph = export_graph(torch, step_arguments(argument))
    else:
        graph = None
    made = _published_model(model, batch) if graph is None else _user_model(model, batch, graph)
    training = _training_of(made.training, checkpointing, state_bytes)
    count = _micro_batches(micro_batches, training)
    choices = FixedChoices(
        micro_batches=micro_batches,
        zero=None if zero is None else ZeroStage(zero),
        recomputation=_RECOMPUTATIONS[checkpointing],
    )
    return replace(
        made,
        training=replace(training, micro_batches=count),
        graph=made.graph if dtype is None else replace(made.graph, dtype=dtype),
        states=made.states if zero is None else States(zero=zero),
        choices=None if choices == FixedChoices() else choices,
        step=None if dtype else _step(made, step, argument, known=graph is None),
    )


def _step(
    made: DescribedModel, target: str, argument: list[str] | None, *, known: bool
) -> StepTarget | None:
    """Return the step that the options name, or the published model's if it is ``known``."""
    if target:
        arguments = tuple(sorted(step_arguments(argument).items()))
        return StepTarget(target=target, arguments=arguments)
    if not known:
        return None
    return step_of(Workload(model=made.name, params=made.params, global_batch=1), ())


def with_model(command: _Command) -> Callable[..., None]:
    """Return ``command`` with the options of a model in place of its parameter ``model``."""
    return options.with_options(command, "model", model_options)


def _published_model(text: str, batch: int) -> DescribedModel:
    name, _, params = text.partition("/")
    known = {m: [p for n, p in published_models() if n == m] for m, _ in published_models()}
    if not text:
        raise InvalidInput(
            "--model",
            f"is required (or --architecture, --hf, --step, --torch); the models are {', '.join(known)}",
        )
    if name not in known:
        raise InvalidInput(
            "--model",
            f"unknown model {name!r}; the models are {', '.join(known)}; describe another one with"
            " --architecture, --hf, --step or --torch",
        )
    if not params and len(known[name]) == 1:
        params = known[name][0]
    if params not in known[name]:
        sizes = ", ".join(f"{name}/{size}" for size in known[name])
        raise InvalidInput(
            "--model",
            f"unknown size {text}; choose from {sizes}"
            if params
            else f"needs a size; choose from {sizes}",
        )
    published = find_published(name, params)
    return DescribedModel(
        name=name,
        params=params,
        graph=published.graph,
        training=published.at(batch),
        states=States(zero=published.zero),
    )


def _user_model(text: str, batch: int, graph: Graph) -> DescribedModel:
    name, _, params = text.partition("/")
    training = Training(global_batch=batch, micro_batches=min(DEFAULT_MICRO_BATCHES, batch))
    return DescribedModel(
        name=_NOT_A_NAME.sub("-", name or graph.name).strip("-") or "model",
        params=params or size_of(graph.parameters),
        graph=graph,
        training=training,
        states=States(),
    )


def size_of(parameters: float) -> str:
    """Return a number of parameters in the notation of model names, e.g. ``1.3B``, ``760M``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.9995 * unit:
            return f"{float(f'{parameters / unit:.3g}'):g}{name}"
    return f"{parameters:.0f}"


def _training_of(
    training: Training, checkpointing: bool | None, state_bytes: float | None
) -> Training:
    if checkpointing is not None:
        training = replace(training, checkpointing=checkpointing)
    return training if state_bytes is None else replace(training, state_bytes=state_bytes)


def _micro_batches(count: int | None, training: Training) -> int:
    """Return the number of micro-batches. If it is None, the training decides."""
    batch = training.global_batch
    if count is not None and batch % count:
        near = ", ".join(map(str, _divisors_near(batch, count)))
        raise InvalidInput(
            "--micro-batches", f"{count} does not divide a batch of {batch}; give one of {near}"
        )
    return count or training.micro_batches


_RECOMPUTATIONS: Final[Mapping[bool | None, Recomputation | None]] = {
    True: Recomputation.FULL,
    False: Recomputation.NONE,
    None: None,
}
"""The recomputation that the option --checkpointing asks for."""


def _divisors_near(batch: int, count: int) -> list[int]:
    """Return the divisors of ``batch`` next to ``count``, at most three on either side."""
    small = [d for d in range(1, int(batch**0.5) + 1) if batch % d == 0]
    divisors = sorted({*small, *(batch // d for d in small)})
    return [d for d in divisors if d < count][-3:] + [d for d in divisors if d > count][:3]


def step_arguments(texts: Iterable[str] | None) -> dict[str, ArgumentValue]:
    """Return ``key=value`` texts as arguments: whole numbers, other numbers, or texts."""
    return {key: value_of(text) for key, text in options.parse_labels("--argument", texts).items()}


def trace_graph(target: str, arguments: Mapping[str, Any]) -> Graph:
    """Return the graph of a step.

    Raises:
        InvalidInput: the step cannot be traced.
        CallFailed: JAX is not installed.
    """
    require_jax()
    from tessera.service.cli.estimates import measuring  # noqa: PLC0415 - JAX starts slowly

    return measuring.graph_of(target, arguments)


def require_jax() -> None:
    """Check that JAX is installed, and make modules in the current folder importable.

    Raises:
        CallFailed: JAX is not installed.
    """
    _require_modules("jax", "equinox", extra="estimator")


def _require_modules(*modules: str, extra: str) -> None:
    """Check that ``modules`` are installed, and make modules in the current folder importable.

    Raises:
        CallFailed: some of ``modules`` are missing.
    """
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise CallFailed(
            f"this needs {' and '.join(missing)}; install it with: {install_hint(extra)}",
            Exit.REFUSED,
        )
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
