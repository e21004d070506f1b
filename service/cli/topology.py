"""``tessera topology``: look at a network as a file describes it, with no server."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from formulation.errors import InvalidInput
from formulation.network.document import assumptions, read
from formulation.network.fields import near
from formulation.network.lingjun import rows_of
from formulation.network.measures import LinkKind, bisection_bytes_per_s, link_kinds, tiers
from formulation.network.routes import MOST, Routes
from formulation.network.topology import Tier, Topology
from service.cli import yamlfile
from service.cli.render import Column, line, note, number, show_facts, show_table

WORDS: Final = {
    Tier.GPU: "GPU", Tier.NVSWITCH: "NVSwitch", Tier.PCIE: "PCIe switch", Tier.NIC: "NIC", Tier.TOR: "ToR",
    Tier.AGGREGATION: "aggregation", Tier.CORE: "core",
}  # fmt: skip

TIERS: Final = (
    Column[tuple[Tier, int]]("TIER", lambda t: WORDS[t[0]]),
    Column[tuple[Tier, int]]("VERTICES", lambda t: f"{t[1]:,}", right=True),
)
LINKS: Final = (
    Column[LinkKind]("FROM", lambda k: WORDS[k.source]),
    Column[LinkKind]("TO", lambda k: WORDS[k.target]),
    Column[LinkKind]("LINKS", lambda k: f"{k.links:,}", right=True),
    Column[LinkKind]("GB/s", lambda k: number(k.bytes_per_s / 1e9), right=True),
    Column[LinkKind]("DELAY us", lambda k: number(k.delay_s * 1e6), right=True),
)


def add(app: typer.Typer) -> None:
    """Add the commands on topologies."""
    group = typer.Typer(help="Look at a network, with no server.", no_args_is_help=True)
    group.callback()(_group)
    group.command("show")(show)
    app.add_typer(group, name="topology", rich_help_panel="Clusters")


def _group() -> None:
    """Look at a network, with no server."""


def read_topology(source: str) -> tuple[Topology, list[str]]:
    """Return the topology of a YAML or JSON file, and what its kind takes for granted.

    In a file of the kind ``lingjun``, ``file`` names the data set's CSV, from the file's folder.

    Raises:
        InvalidInput: names the file and the field, and says what is allowed.
    """
    found = yamlfile.documents(yamlfile.read(source), source)
    if len(found) != 1:
        raise InvalidInput(source, f"must hold one topology, not {len(found)}")
    document = found[0]
    if isinstance(document, dict) and document.get("kind") == "lingjun" and "file" in document:
        document = _with_rows(document, source)
    try:
        return read(document), assumptions(document)
    except InvalidInput as wrong:
        raise InvalidInput(source, str(wrong)) from wrong


def _with_rows(document: dict[str, Any], source: str) -> dict[str, Any]:
    if "rows" in document:
        raise InvalidInput(source, "file, rows: one of them must be given, and only one")
    beside = Path() if source == yamlfile.STDIN else Path(source).parent
    path = str(beside / str(document["file"]))
    rest = {key: value for key, value in document.items() if key != "file"}
    return rest | {"rows": rows_of(yamlfile.read(path), path)}


def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A topology in YAML or JSON; '-' for stdin.")],
    paths: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="HOST HOST", help="The ways between first GPUs of two hosts.", show_default=False
        ),
    ] = None,
    most: Annotated[int, typer.Option(help="So many equal-cost paths at most.", min=1, max=65_536)] = MOST,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:  # fmt: skip
    """Show what a topology is made of: vertices, links by speed, what its halves can send each other."""
    topology, assumed = read_topology(file)
    ways: list[tuple[str, ...]] = []
    total = 0
    if paths is not None:
        ways, total = _ways(topology, paths, most)
    if as_json:
        line(json.dumps(_answer(topology, assumed, ways, total, asked=paths is not None), indent=2))
        return
    bisection = bisection_bytes_per_s(topology)
    show_facts([
        ("hosts", f"{len(topology.hosts):,}"),
        ("bisection", "" if bisection is None else f"{number(bisection / 1e9)} GB/s between halves of ToRs"),
        ("paths", "chosen by switches (adaptive)" if topology.adaptive else "chosen by source port (ECMP)"),
    ])  # fmt: skip
    show_table(list(tiers(topology).items()), TIERS)
    show_table(link_kinds(topology), LINKS)
    for way, times in Counter(ways).items():
        line(" > ".join(way) + (f"  ({times} by parallel cables)" if times > 1 else ""))
    if total > len(ways):
        note(f"{len(ways):,} of {total:,} equal-cost paths; --most lists more")
    for sentence in assumed:
        note(sentence)


def _ways(
    topology: Topology, hosts: tuple[str, str], most: int
) -> tuple[list[tuple[str, ...]], int]:
    """Return the listed paths as names of vertices, and how many there are."""
    numbers = []
    for name in hosts:
        if name not in topology.hosts:
            raise InvalidInput("--paths", f"there is no host {name!r}{near(name, topology.hosts)}")
        numbers.append(topology.hosts.index(name))
        if not len(topology.gpus_of(numbers[-1])):
            raise InvalidInput("--paths", f"{name} has no GPU")
    if numbers[0] == numbers[1]:
        raise InvalidInput("--paths", "needs two different hosts")
    source, target = (int(topology.gpus_of(i)[0]) for i in numbers)
    names, links = topology.vertices.name, topology.links
    routes = Routes(topology, most)
    found = [
        (names[source], *(names[links.target[link]] for link in path))
        for path in routes.between(source, target)
    ]
    return found, routes.count(source, target)


def _answer(
    topology: Topology, assumed: list[str], ways: list[tuple[str, ...]], total: int, *, asked: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "hosts": len(topology.hosts),
        "adaptive": topology.adaptive,
        "vertices": {tier.name.lower(): count for tier, count in tiers(topology).items()},
        "links": [
            {"from": kind.source.name.lower(), "to": kind.target.name.lower(), "links": kind.links,
             "bytes_per_s": kind.bytes_per_s, "delay_s": kind.delay_s}
            for kind in link_kinds(topology)
        ],
        "bisection_bytes_per_s": bisection_bytes_per_s(topology),
        "assumed": assumed,
    }  # fmt: skip
    return found | ({"paths": ways, "equal_cost_paths": total} if asked else {})
