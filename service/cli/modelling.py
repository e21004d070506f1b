"""Options on the trained model and on its training, and the model that they describe."""

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
from tessera.estimator.architectures.published import find, published_models
from tessera.estimator.cells import MicroBatches
from tessera.estimator.exporting.graphs import export
from tessera.estimator.graph import DTYPE_BYTES, Graph
from tessera.estimator.memory import States
from tessera.estimator.plans import Training
from tessera.estimator.profiling.tasks import Value, value_of
from tessera.formulation.errors import InvalidInput
from tessera.formulation.release import install_hint
from tessera.service.cli import limits, options
from tessera.service.cli.client import CallFailed, Exit

DEFAULT_MICRO_BATCHES: Final = 16
_NOT_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")

_Command = TypeVar("_Command", bound=Callable[..., None])


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A trained model and its training.

    If ``rule`` is None, ``training`` gives the number of micro-batches.
    """

    name: str
    params: str
    graph: Graph
    training: Training
    rule: MicroBatches | None
    states: States


def _option(text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **rest)


def _training(text: str, *names: str, **rest: Any) -> Any:
    return _option(text, *names, rich_help_panel="Training", **rest)


def model_options(
    *,
    batch: Annotated[int, _option("Samples an iteration.", min=1, max=limits.MAX_BATCH)],
    model: Annotated[
        str,
        _option(
            "One of the papers' models; `bert` lists its sizes. With --architecture, --hf, --step or"
            " --torch: the name to give it.",
            "--model",
            "-m",
            metavar="NAME[/PARAMS]",
        ),
    ] = "",
    architecture: Annotated[
        Path | None, _option("Layers, hidden, heads ... in YAML or JSON.", metavar="FILE")
    ] = None,
    hf: Annotated[
        Path | None, _option("A Hugging Face configuration.", metavar="config.json")
    ] = None,
    step: Annotated[
        str,
        _option("A training step in JAX, which is an extra: estimator.", metavar="MODULE:FUNCTION"),
    ] = "",
    torch: Annotated[
        str,
        _option(
            "A PyTorch module and example arguments; an extra: torch.", metavar="MODULE:FUNCTION"
        ),
    ] = "",
    argument: Annotated[
        list[str] | None,
        _option("Of the function of --step or --torch; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    sequence: Annotated[
        int | None, _training("Tokens a sample, instead of the file's.", min=1)
    ] = None,
    dtype: Annotated[str | None, _training(f"Of compute: {', '.join(DTYPE_BYTES)}.")] = None,
    flash: Annotated[
        bool, _training("Attention that stores no scores (files only).", "--flash")
    ] = False,
    micro_batches: Annotated[
        str,
        _training(
            "A number; `stages`, `4-stages`: as many, four times as many as stages; or `searched`. By"
            f" default as the paper has it, or {DEFAULT_MICRO_BATCHES}.",
            metavar="N|stages|4-stages|searched",
        ),
    ] = "",
    checkpointing: Annotated[
        bool | None,
        _training(
            "Repeat forward passes instead of keeping activations; by default as the paper does, else not.",
            "--checkpointing/--no-checkpointing",
        ),
    ] = None,
    zero: Annotated[int | None, _training("ZeRO stage.", min=0, max=3)] = None,
    state_bytes: Annotated[
        float | None,
        _training("Of a parameter with gradient and optimizer; 16: Adam.", min=1.0, max=64.0),
    ] = None,
) -> Model:
    """Return the model that the options describe. Raises InvalidInput."""
    models = {"--architecture": architecture, "--hf": hf, "--step": step, "--torch": torch}
    given = [name for name, value in models.items() if value]
    if len(given) > 1:
        raise InvalidInput(", ".join(given), "are each a model of its own; give one of them")
    if argument and not (step or torch):
        raise InvalidInput("--argument", "belongs to --step or --torch")
    if dtype is not None and dtype not in DTYPE_BYTES:
        raise InvalidInput("--dtype", f"must be one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    file = architecture or hf
    if file is None and (flash or (sequence is not None)):
        raise InvalidInput("--sequence, --flash", "belong to --architecture or --hf")
    if file is not None:
        graph = files.load(file, sequence=sequence, dtype=dtype, flash=flash)
    elif step:
        graph = trace_graph(step, step_arguments(argument))
    elif torch:
        _need("torch", extra="torch")
        graph = export(torch, step_arguments(argument))
    else:
        graph = None
    made = _published(model, batch) if graph is None else _own(model, batch, graph)
    training = _training_of(made.training, checkpointing, state_bytes)
    count, rule = _micro_batches(micro_batches, training)
    return replace(
        made,
        training=replace(training, micro_batches=count),
        rule=rule,
        graph=made.graph if dtype is None else replace(made.graph, dtype=dtype),
        states=made.states if zero is None else States(zero=zero),
    )


def with_model(command: _Command) -> Callable[..., None]:
    """Return ``command`` with all options of ``asked`` in place of its parameter ``model``."""
    return options.with_options(command, "model", model_options)


def _published(text: str, batch: int) -> Model:
    name, _, params = text.partition("/")
    known = {m: [p for n, p in published_models() if n == m] for m, _ in published_models()}
    if not text:
        raise InvalidInput(
            "--model",
            f"is needed (or --architecture, --hf, --step, --torch); there are {', '.join(known)}",
        )
    if name not in known:
        raise InvalidInput(
            "--model",
            f"there is no model {name!r}, only {', '.join(known)}; describe another one with"
            " --architecture, --hf, --step or --torch",
        )
    if not params and len(known[name]) == 1:
        params = known[name][0]
    if params not in known[name]:
        sizes = ", ".join(f"{name}/{size}" for size in known[name])
        raise InvalidInput(
            "--model", f"{text}: there are {sizes}" if params else f"name a size: {sizes}"
        )
    found = find(name, params)
    return Model(
        name=name,
        params=params,
        graph=found.graph,
        training=found.at(batch),
        rule=None,
        states=States(zero=found.zero),
    )


def _own(text: str, batch: int, graph: Graph) -> Model:
    name, _, params = text.partition("/")
    training = Training(global_batch=batch, micro_batches=min(DEFAULT_MICRO_BATCHES, batch))
    return Model(
        name=_NOT_A_NAME.sub("-", name or graph.name).strip("-") or "model",
        params=params or size_of(graph.parameters),
        graph=graph,
        training=training,
        rule=None,
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


def _micro_batches(text: str, training: Training) -> tuple[int, MicroBatches | None]:
    """Return the number of micro-batches, and the rule that replaces it or None."""
    if text in tuple(MicroBatches):
        return training.micro_batches, MicroBatches(text)
    if text and not (text.isascii() and text.isdigit() and 0 < int(text) <= limits.MAX_BATCH):
        raise InvalidInput(
            "--micro-batches",
            f"must be a number from 1, or {', '.join(MicroBatches)}, not {text!r}",
        )
    count, batch = int(text) if text else training.micro_batches, training.global_batch
    if batch % count:
        near = ", ".join(map(str, _divisors_near(batch, count)))
        raise InvalidInput(
            "--micro-batches", f"{count} do not divide a batch of {batch}; give one of {near}"
        )
    return count, None


def _divisors_near(batch: int, count: int) -> list[int]:
    """Return the divisors of ``batch`` next to ``count``, at most three on either side."""
    small = [d for d in range(1, int(batch**0.5) + 1) if batch % d == 0]
    every = sorted({*small, *(batch // d for d in small)})
    return [d for d in every if d < count][-3:] + [d for d in every if d > count][:3]


def step_arguments(texts: Iterable[str] | None) -> dict[str, Value]:
    """Return ``key=value`` texts as arguments: whole numbers, other numbers, or texts."""
    return {key: value_of(text) for key, text in options.labels("--argument", texts).items()}


def trace_graph(target: str, arguments: Mapping[str, Any]) -> Graph:
    """Return the graph of a step. Raises InvalidInput, CallFailed: JAX is not installed."""
    need_jax()
    from tessera.service.cli import measuring  # noqa: PLC0415 - JAX starts slowly

    return measuring.graph_of(target, arguments)


def need_jax() -> None:
    """Check that JAX is installed, and make the modules in the current folder importable.

    Raises:
        CallFailed: JAX is not installed.
    """
    _need("jax", "equinox", extra="estimator")


def _need(*modules: str, extra: str) -> None:
    """Make modules in the current folder importable. Raises CallFailed: ``modules`` are missing."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise CallFailed(
            f"this needs {' and '.join(missing)}; install it with: {install_hint(extra)}",
            Exit.REFUSED,
        )
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
