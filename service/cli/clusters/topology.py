"""``tessera topology``: show, set or delete the description of a cluster's network."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tessera.client import Client, NotFound
from tessera.estimator.files import documents
from tessera.formulation.base import limits
from tessera.formulation.base.documents import TOPOLOGY
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies.document import build_topology, list_assumptions
from tessera.formulation.state.topologies.fields import similar_word_hint
from tessera.formulation.state.topologies.lingjun import rows_of
from tessera.formulation.state.topologies.measures import (
    LinkKind,
    bisection_bytes_per_s,
    count_tiers,
    link_kinds,
)
from tessera.formulation.state.topologies.routes import MAX_PATHS, Routes
from tessera.formulation.state.topologies.topology import Tier, Topology
from tessera.service.cli import yamlfile
from tessera.service.cli.client import connect, explain_failure
from tessera.service.cli.deletion import AllowMissing, Yes, confirm_deletion
from tessera.service.cli.names import cluster_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
)
from tessera.service.cli.render import (
    Column,
    format_number,
    print_line,
    print_note,
    show_facts,
    show_message,
    show_table,
)
from tessera.v1 import networks_pb2

TOPOLOGY_LIMITS: Final = replace(TOPOLOGY, yaml_bytes=TOPOLOGY.size_bytes)
"""The server's limits, except that YAML may be as long as JSON. The server receives JSON."""

TIER_NAMES: Final = {
    Tier.GPU: "GPU",
    Tier.NVSWITCH: "NVSwitch",
    Tier.PCIE: "PCIe switch",
    Tier.NIC: "NIC",
    Tier.TOR: "ToR",
    Tier.AGGREGATION: "aggregation",
    Tier.CORE: "core",
}

TIER_COLUMNS: Final = (
    Column[tuple[Tier, int]]("TIER", lambda t: TIER_NAMES[t[0]]),
    Column[tuple[Tier, int]]("VERTICES", lambda t: f"{t[1]:,}", right=True),
)
LINK_COLUMNS: Final = (
    Column[LinkKind]("FROM", lambda k: TIER_NAMES[k.source]),
    Column[LinkKind]("TO", lambda k: TIER_NAMES[k.target]),
    Column[LinkKind]("LINKS", lambda k: f"{k.links:,}", right=True),
    Column[LinkKind]("GB/s", lambda k: format_number(k.bytes_per_s / 1e9), right=True),
    Column[LinkKind]("DELAY us", lambda k: format_number(k.delay_s * 1e6), right=True),
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands on topologies."""
    group = typer.Typer(help=_group.__doc__, no_args_is_help=True)
    group.callback()(_group)
    group.command("show")(show_topology)
    group.command("get")(get_topology)
    group.command("set")(set_topology)
    group.command("delete")(delete_topology)
    app.add_typer(group, name="topology", rich_help_panel="Clusters")


def _group() -> None:
    """Show, describe or delete the network of a cluster."""


def read_topology(source: str) -> tuple[Topology, list[str]]:
    """Return the topology of a YAML or JSON file, and the assumptions of its kind.

    In a file of the kind ``lingjun``, ``file`` names the data set's CSV, relative to the file's
    folder.

    Raises:
        InvalidInput: names the file and the field, and says what is allowed.
    """
    document, _ = read_document(source)
    try:
        return build_topology(document), list_assumptions(document)
    except InvalidInput as wrong:
        raise InvalidInput(source, str(wrong)) from wrong


def read_document(source: str) -> tuple[object, str]:
    """Return the document of a YAML or JSON file, with the rows that it names, and its etag or "".

    The file holds a description, or the output of `topology get -o yaml`. Raises InvalidInput.
    """
    content = documents.read_document(source, yamlfile.read_text(source), TOPOLOGY_LIMITS)
    if content is None:
        raise InvalidInput(source, "must contain one topology, but is empty")
    document, etag = _unwrap(content, source)
    if isinstance(document, dict) and document.get("kind") == "lingjun" and "file" in document:
        document = _with_rows(document, source)
    return document, etag


def _unwrap(content: object, source: str) -> tuple[object, str]:
    """Return the description and the etag in the output of `topology get -o yaml`.

    Anything else is returned unchanged, with the etag "".

    Raises:
        InvalidInput: the description inside cannot be read.
    """
    if not (isinstance(content, dict) and isinstance(content.get("document"), str)):
        return content, ""
    inner = documents.read_document(f"{source}: document", content["document"], TOPOLOGY_LIMITS)
    return inner, str(content.get("etag") or "")


def _with_rows(document: dict[str, Any], source: str) -> dict[str, Any]:
    if "rows" in document:
        raise InvalidInput(source, "needs exactly one of 'file' and 'rows'")
    folder = Path() if source == yamlfile.STDIN else Path(source).parent
    path = str(folder / str(document["file"]))
    rest = {key: value for key, value in document.items() if key != "file"}
    return rest | {"rows": rows_of(yamlfile.read_text(path), path)}


def show_topology(
    file: Annotated[
        str,
        typer.Argument(
            metavar="[FILE]",
            help="Topology in YAML or JSON; '-' for stdin. Default: the cluster's.",
            show_default=False,
        ),
    ] = "",
    paths: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="HOST HOST",
            help="Also list the paths between the first GPUs of two hosts.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[
        int, typer.Option(help="Maximum number of equal-cost paths to list.", min=1, max=65_536)
    ] = MAX_PATHS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Show the vertices of a topology, its links by speed and its bisection bandwidth.

    With FILE, no server is needed.
    """
    topology, assumed = read_topology(file) if file else _stored(server, cluster)
    ways: list[tuple[str, ...]] = []
    total = 0
    if paths is not None:
        ways, total = _ways(topology, paths, most)
    if as_json:
        print_line(
            json.dumps(_answer(topology, assumed, ways, total, asked=paths is not None), indent=2)
        )
        return
    bisection = bisection_bytes_per_s(topology)
    show_facts(
        [
            ("hosts", f"{len(topology.hosts):,}"),
            (
                "bisection",
                ""
                if bisection is None
                else f"{format_number(bisection / 1e9)} GB/s between halves of the ToRs",
            ),
            (
                "paths",
                "chosen by switches (adaptive)"
                if topology.adaptive
                else "chosen by source port (ECMP)",
            ),
        ]
    )
    show_table(list(count_tiers(topology).items()), TIER_COLUMNS)
    show_table(link_kinds(topology), LINK_COLUMNS)
    for way, times in Counter(ways).items():
        print_line(" > ".join(way) + (f"  ({times} parallel cables)" if times > 1 else ""))
    if total > len(ways):
        print_note(f"{len(ways):,} of {total:,} equal-cost paths are listed; --most lists more")
    for sentence in assumed:
        print_note(sentence)


def get_topology(
    document: Annotated[
        bool,
        typer.Option(
            "--document", help="Print only the description, in the form that `set` reads."
        ),
    ] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Get the description of a cluster's network, and the hosts and nodes that do not match."""
    with connect(server) as client:
        stored = _get(client, cluster_name(cluster))
    if document:
        print_line(stored.document)
    else:
        _show(stored, output)


def set_topology(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Topology in YAML or JSON; '-' for stdin.")
    ],
    etag: Annotated[
        str,
        typer.Option(
            help="Replace the description only if `get` still shows this etag. '\"0\"': only if there is no"
            " description yet."
        ),
    ] = "",
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Describe a cluster's network, or replace its description. The network is then planned again."""
    described, stored_etag = read_document(file)
    try:
        build_topology(described)
        text = json.dumps(described, allow_nan=False)
    except InvalidInput as wrong:
        raise InvalidInput(file, str(wrong)) from wrong
    except (TypeError, ValueError) as wrong:
        raise InvalidInput(file, f"has a value that cannot be written as JSON: {wrong}") from wrong
    topology = networks_pb2.Topology(
        name=_name(cluster_name(cluster)), document=text, etag=etag or stored_etag
    )
    request = networks_pb2.UpdateTopologyRequest(topology=topology, validate_only=validate_only)
    with connect(server) as client:
        stored = client.call(client.stubs.networks.UpdateTopology, request)
    _show(stored, output)
    print_note("valid; nothing changed" if validate_only else "network described")
    for sentence in list_assumptions(described):
        print_note(sentence)


def delete_topology(
    etag: Annotated[
        str, typer.Option(help="Delete only if `get` still shows this etag.", show_default=False)
    ] = "",
    allow_missing: AllowMissing = False,
    yes: Yes = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Delete the description of a cluster's network, and its network plans. Jobs keep running."""
    request = networks_pb2.DeleteTopologyRequest(
        name=_name(cluster_name(cluster)),
        etag=etag,
        allow_missing=allow_missing,
        validate_only=validate_only,
    )
    if not validate_only:
        confirm_deletion(
            f"Delete the network of cluster {short_name(cluster_name(cluster))}?", yes=yes
        )
    with connect(server) as client:
        client.call(client.stubs.networks.DeleteTopology, request)
    print_note("valid; nothing changed" if validate_only else "network deleted")


def _get(client: Client, cluster: str) -> networks_pb2.Topology:
    try:
        request = networks_pb2.GetTopologyRequest(name=_name(cluster))
        return client.call(client.stubs.networks.GetTopology, request)
    except NotFound as failed:
        is_of_network = "/" in failed.facts.get("resource", "").removeprefix("clusters/")
        hint = "; describe it with `tessera topology set FILE`" if is_of_network else ""
        raise explain_failure(failed, client, hint) from failed


def _stored(server: str, cluster: str) -> tuple[Topology, list[str]]:
    """Return the cluster's topology, and the assumptions of its kind."""
    with connect(server) as client:
        document = json.loads(_get(client, cluster_name(cluster)).document)
    return build_topology(document), list_assumptions(document)


def _name(cluster: str) -> str:
    return f"{cluster}/topology"


def _show(topology: networks_pb2.Topology, output: Output) -> None:
    if output is Output.NAME:
        print_line(topology.name)
    elif not show_message(topology, output):
        show_facts(
            [
                ("topology", topology.name),
                ("hosts", f"{topology.hosts:,}"),
                ("switches", f"{topology.switches:,}"),
                ("links", f"{topology.links:,}"),
                ("etag", topology.etag),
                ("hosts without a node", _listed(topology.unknown_hosts)),
                ("missing nodes", _listed(topology.missing_nodes)),
            ]
        )
    if topology.missing_nodes:
        print_note(
            "jobs on missing nodes get no paths and priority levels, and count as free of contention"
        )


def _listed(names: Sequence[str]) -> str:
    """Return names as a list, with "..." if the server may have cut it."""
    return ", ".join(names) + (", ..." if len(names) >= limits.MAX_NAMED_HOSTS else "")


def _ways(
    topology: Topology, hosts: tuple[str, str], most: int
) -> tuple[list[tuple[str, ...]], int]:
    """Return the listed paths as names of vertices, and the total number of paths."""
    numbers = []
    for name in hosts:
        if name not in topology.hosts:
            raise InvalidInput(
                "--paths", f"unknown host {name!r}{similar_word_hint(name, topology.hosts)}"
            )
        numbers.append(topology.hosts.index(name))
        if not len(topology.gpus_of(numbers[-1])):
            raise InvalidInput("--paths", f"{name} has no GPU")
    if numbers[0] == numbers[1]:
        raise InvalidInput("--paths", "needs two different hosts")
    source, target = (int(topology.gpus_of(i)[0]) for i in numbers)
    names, links = topology.vertices.name, topology.links
    routes = Routes(topology, most)
    paths = [
        (names[source], *(names[links.target[link]] for link in path))
        for path in routes.between(source, target)
    ]
    return paths, routes.count(source, target)


def _answer(
    topology: Topology, assumed: list[str], ways: list[tuple[str, ...]], total: int, *, asked: bool
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "hosts": len(topology.hosts),
        "adaptive": topology.adaptive,
        "vertices": {tier.name.lower(): count for tier, count in count_tiers(topology).items()},
        "links": [
            {
                "from": kind.source.name.lower(),
                "to": kind.target.name.lower(),
                "links": kind.links,
                "bytes_per_s": kind.bytes_per_s,
                "delay_s": kind.delay_s,
            }
            for kind in link_kinds(topology)
        ],
        "bisection_bytes_per_s": bisection_bytes_per_s(topology),
        "assumed": assumed,
    }
    return answer | ({"paths": ways, "equal_cost_paths": total} if asked else {})
