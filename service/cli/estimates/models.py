"""Commands on the models that a cluster can estimate automatically."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import yamlfile
from tessera.service.cli.client import connect
from tessera.service.cli.deletion import (
    AllowMissing,
    Yes,
    confirm_deletion,
    outcome_of,
    show_deleted,
)
from tessera.service.cli.names import cluster_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
    refuse_options,
)
from tessera.service.cli.render import (
    Column,
    count_noun,
    format_number,
    print_line,
    print_note,
    show_message,
    show_table,
)
from tessera.v1.estimates_pb2 import (
    DeleteModelsRequest,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    ModelName,
    UpsertModelsRequest,
)

MODEL_COLUMNS: Final[Sequence[Column[Model]]] = (
    Column("MODEL", lambda m: _name(m)),
    Column("PARAMETERS", lambda m: format_number(m.parameters), right=True),
    Column("DTYPE", lambda m: m.dtype),
    Column("MICRO-BATCHES", lambda m: str(m.micro_batches), right=True),
    Column("STATE BYTES", lambda m: format_number(m.state_bytes), right=True),
    Column("CHECKPOINTING", lambda m: "yes" if m.checkpointing else "no"),
    Column("ZERO", lambda m: str(m.zero), wide=True, right=True),
    Column("FROM", lambda m: "this release" if m.published else "the cluster"),
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands on models."""
    group = typer.Typer(
        help="List, describe or delete the models of a cluster.",
        invoke_without_command=True,
    )
    group.callback()(list_models)
    group.command("add")(add_model)
    group.command("delete")(delete_models)
    app.add_typer(group, name="models", rich_help_panel="Estimates")


def list_models(
    context: typer.Context,
    published: Annotated[
        bool,
        typer.Option(
            "--published", help="Also list the models of this release, which every cluster knows."
        ),
    ] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List, describe or delete the models of a cluster.

    Jobs that train a known model get estimates automatically.
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    with connect(server) as client:
        request = ListModelsRequest(parent=cluster_name(cluster), with_published=published)
        models = list(
            client.pages(client.stubs.estimates.ListModels, request, lambda page: page.models)
        )
    _show(ListModelsResponse(models=models), models, output)
    if not models:
        print_note(
            f"cluster {short_name(cluster_name(cluster))} has no models of its own; `tessera models add`"
            " describes one, and"
            " `tessera models --published` lists those of this release"
        )


def _option(text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **rest)


def add_model(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[/PARAMS]",
            help="The model as jobs name it, e.g. llama/7B for --model llama --params 7B.",
        ),
    ],
    architecture: Annotated[
        str,
        _option(
            "Description of the architecture (layers, hidden size, heads ...) in YAML or JSON; '-' for"
            " stdin.",
            metavar="FILE",
        ),
    ] = "",
    hf: Annotated[
        str, _option("Configuration of a Hugging Face model.", metavar="config.json")
    ] = "",
    micro_batches: Annotated[
        int,
        _option(
            "Micro-batches of an iteration, at most one for each sample. Default: 16.",
            min=1,
            max=limits.MAX_MICRO_BATCHES,
        ),
    ] = 16,
    state_bytes: Annotated[
        float,
        _option(
            "Bytes of a parameter with its gradient and optimizer state. Default: 16, as for Adam.",
            min=1.0,
            max=limits.MAX_STATE_BYTES,
        ),
    ] = 16.0,
    checkpointing: Annotated[
        bool,
        _option(
            "Recompute activations instead of keeping them. Default: keep them.",
            "--checkpointing/--no-checkpointing",
        ),
    ] = False,
    dtype: Annotated[
        str, _option(f"Data type of compute: {', '.join(limits.DTYPES)}. Default: the file's.")
    ] = "",
    sequence: Annotated[
        int | None,
        _option("Tokens of a sample. Default: the file's.", min=1, max=limits.MAX_SEQUENCE),
    ] = None,
    flash: Annotated[bool, _option("Use attention that stores no scores.", "--flash")] = False,
    zero: Annotated[int, _option("ZeRO stage. Default: 0.", min=0, max=3)] = 0,
    step: Annotated[
        str,
        _option(
            "Training step in JAX that the nodes can import. `submit --profile` measures it.",
            metavar="MODULE:FUNCTION",
        ),
    ] = "",
    argument: Annotated[
        list[str] | None,
        _option("Argument of the step's function. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Describe a model to a cluster, or replace its description. Jobs that wait for it are estimated at once.

    The description takes precedence over a published model of the same name.
    """
    model, params = _parse_name(name)
    if dtype and dtype not in limits.DTYPES:
        raise InvalidInput("--dtype", f"must be one of {', '.join(limits.DTYPES)}, not {dtype!r}")
    described = Model(
        model=model,
        params=params,
        architecture=_read_description(architecture, hf),
        dtype=dtype,
        sequence=sequence or 0,
        flash=flash,
        micro_batches=micro_batches,
        state_bytes=state_bytes,
        checkpointing=checkpointing,
        zero=zero,
        step=step,
        step_arguments=argument or [],
    )
    request = UpsertModelsRequest(
        parent=cluster_name(cluster),
        models=[described],
        validate_only=validate_only,
    )
    with connect(server) as client:
        stored = client.call(client.stubs.estimates.UpsertModels, request)
    _show(ListModelsResponse(models=stored.models), stored.models, output)
    print_note(f"{name} {'is valid; nothing changed' if validate_only else 'added'}")


def delete_models(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[/PARAMS]...",
            help="The cluster's own models, as `tessera models` lists them.",
        ),
    ],
    allow_missing: AllowMissing = False,
    yes: Yes = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete models (all or none) and the Cells computed from them. No live job may train them."""
    models = [_parse_name(name) for name in names]
    request = DeleteModelsRequest(
        parent=cluster_name(cluster),
        models=[ModelName(model=m, params=p) for m, p in models],
        allow_missing=allow_missing,
        validate_only=validate_only,
    )
    what = count_noun(len(names), "model")
    if not validate_only:
        confirm_deletion(f"Delete {what} of cluster {short_name(cluster_name(cluster))}?", yes=yes)
    with connect(server) as client:
        client.call(client.stubs.estimates.DeleteModels, request)
    show_deleted(names, output)
    print_note(outcome_of(what, validate_only=validate_only))


def _parse_name(name: str) -> tuple[str, str]:
    """Return the model and its params. Raises InvalidInput."""
    model, slash, params = name.partition("/")
    if not model or "/" in params or (slash and not params):
        raise InvalidInput(name[:200], "must be NAME or NAME/PARAMS, e.g. llama/7B")
    return model, params


def _read_description(architecture: str, hf: str) -> str:
    """Return the text of the given file. Raises InvalidInput."""
    if bool(architecture) == bool(hf):
        problem = "exclude each other; give one of them" if hf else "give one of them"
        raise InvalidInput("--architecture, --hf", problem)
    source = architecture or hf
    text = yamlfile.read_text(source)
    if not 1 <= len(text) <= limits.MAX_ARCHITECTURE:
        raise InvalidInput(
            source,
            f"must be a text of 1 to {limits.MAX_ARCHITECTURE:,} characters, not {len(text):,}",
        )
    return text


def _show(response: ListModelsResponse, models: Sequence[Model], output: Output) -> None:
    """Print models. As names, they are NAME/PARAMS, because models are not resources."""
    if show_message(response, output):
        return
    if output is Output.NAME:
        for model in models:
            print_line(_name(model))
    elif models:
        show_table(models, [c for c in MODEL_COLUMNS if output is Output.WIDE or not c.wide])


def _name(model: Model) -> str:
    return f"{model.model}/{model.params}" if model.params else model.model
