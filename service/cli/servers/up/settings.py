"""The settings with which ``tessera up`` uses a data directory, from its record and the options."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import typer

from tessera.db.schema.engine import without_password
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.client import Exit
from tessera.service.cli.clusters import clusterfile
from tessera.service.cli.options import DEFAULT_CLUSTER
from tessera.service.cli.render import print_note
from tessera.service.cli.servers.up.home import DataDirectory, DataDirectoryRecord

EXAMPLE_SOURCE: Final = "the example"
"""The source of the cluster that is started if no file is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options on the cluster and its database. An empty text or None means not given."""

    file: str
    text: str  # the text of the file
    cluster: str
    clock_factor: float | None
    database_url: str


def resolve_settings(asked: UpOptions, home: DataDirectory) -> DataDirectoryRecord:
    """Return the settings to start with: those of the data directory, changed by the options.

    Raises:
        InvalidInput: the options contradict the directory; the message says what to do.
    """
    before = home.record
    if before is None or not before.applied:  # nothing has been made with it yet
        text = asked.text or clusterfile.EXAMPLE_CLUSTER
        named = clusterfile.read_cluster(text, asked.file or EXAMPLE_SOURCE).name
        return DataDirectoryRecord(
            cluster=asked.cluster or named or DEFAULT_CLUSTER,
            source=asked.file,
            description=text,
            clock_factor=asked.clock_factor or 1.0,
            database=without_password(asked.database_url),
        )
    if without_password(asked.database_url) != before.database:
        raise InvalidInput("--database-url", _other_database(asked, before, home.path))
    if difference := _difference(asked, before):
        raise InvalidInput(
            "--file" if asked.file else "--cluster",
            f"{difference}, but {home.path} was made with {_cluster_of(before)}; omit --file and --cluster to"
            " continue with that cluster, choose another --data-dir, or add --reset to delete it and start"
            " from scratch",
        )
    print_note(f"continuing with {_cluster_of(before)} in {home.path}; --reset starts from scratch")
    record = before
    if asked.file and asked.text != before.description:
        record = replace(record, source=asked.file, description=asked.text)
    if asked.clock_factor is not None and asked.clock_factor != before.clock_factor:
        print_note(
            f"the clock factor is {asked.clock_factor:g} from now on (before: {before.clock_factor:g})"
        )
        record = replace(record, clock_factor=asked.clock_factor)
    return record


def _cluster_of(record: DataDirectoryRecord) -> str:
    return f"cluster {record.cluster} of {record.source or EXAMPLE_SOURCE}"


def _difference(asked: UpOptions, before: DataDirectoryRecord) -> str:
    """Return how the options describe a different cluster, or "" if they only add to it, or nothing."""
    old = clusterfile.read_cluster(before.description, before.source or EXAMPLE_SOURCE)
    if asked.cluster and asked.cluster != before.cluster:
        return f"names cluster {asked.cluster}"
    if not asked.file:
        return ""
    new = clusterfile.read_cluster(asked.text, asked.file)
    if not asked.cluster and (new.name or DEFAULT_CLUSTER) != before.cluster:
        return f"{asked.file} describes cluster {new.name or DEFAULT_CLUSTER}"
    types = {kind.name: kind.memory_bytes for kind in new.gpu_types}
    for kind in old.gpu_types:
        if types.get(kind.name) != kind.memory_bytes:
            return f"{asked.file} has no GPU type {kind.name} with the same memory"
    nodes = {node.name: (node.gpu_type, node.gpus) for node in new.nodes}
    for node in old.nodes:
        if nodes.get(node.name) != (node.gpu_type, node.gpus):
            return f"{asked.file} has no node {node.name} with {node.gpus} x {node.gpu_type}"
    return ""


def _other_database(asked: UpOptions, before: DataDirectoryRecord, path: Path) -> str:
    made = f"the database {before.database}" if before.database else "its embedded database"
    way = f"give --database-url {before.database}" if before.database else "omit this option"
    variable = "" if before.database else " (TESSERA_DATABASE_URL may be set)"
    return f"{path} was made with {made}; {way}{variable}, or choose another --data-dir"


def delete_data(home: DataDirectory, asked: UpOptions, *, confirmed: bool) -> None:
    """Delete the contents of the data directory, if the user agrees.

    Raises:
        InvalidInput: the directory is not ours, its database is elsewhere, or nobody can be asked.
    """
    external = asked.database_url or (home.record.database if home.record else "")
    if external:
        raise InvalidInput(
            "--reset",
            f"only deletes data directories, but the database {without_password(external)} is not in one;"
            " empty it yourself, or choose another one",
        )
    contents = [entry for entry in home.path.iterdir() if not entry.name.startswith(".")]
    if not home.is_ours():
        if contents:
            raise InvalidInput(
                "--reset", f"{home.path} was not made by `tessera up`, so nothing was deleted"
            )
        return
    what = f"all jobs, rounds, logs and checkpoints in {home.path}"
    if not confirmed:
        if not sys.stdin.isatty():
            raise InvalidInput(
                "--reset",
                f"deletes {what}; add --yes to confirm, because there is no terminal to ask on",
            )
        if not typer.confirm(f"Delete {what}?", err=True):
            raise typer.Exit(Exit.OK)
    home.delete()
    print_note(f"deleted {what}")
