"""Cluster files: GPU types, nodes and tenants in YAML. ``docs/command-line.md`` describes the format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator, Field, RootModel

from tessera.estimator.files.schemas import STRICT, check_value, number_between, whole_between
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.cli.clusters import tenantfile
from tessera.service.cli.entries import Bytes, FileEntry, Labels, Size, Text
from tessera.service.cli.names import ANY_TYPE, short_name
from tessera.service.cli.yamlfile import read_documents, text_of
from tessera.v1.clusters_pb2 import GpuType, Node
from tessera.v1.tenants_pb2 import Tenant

_Dollars = Annotated[float, number_between(0.0, limits.MAX_DOLLARS_PER_HOUR)]
_Watts = Annotated[float, number_between(0.0, limits.MAX_WATTS)]


class GpuTypeEntry(FileEntry):
    """The settings of a GPU type in a cluster file, except for its name."""

    memory: Size
    dollars_per_hour: _Dollars = 0.0
    watts: _Watts = 0.0


class PrintedGpuType(FileEntry):
    """A GPU type as printed by `tessera cluster get -o yaml`. Its number of GPUs is ignored."""

    name: Text
    memory_bytes: Bytes
    dollars_per_hour: _Dollars = 0.0
    watts: _Watts = 0.0
    node_gpus: object = None


class _PrintedGpuTypes(RootModel[list[PrintedGpuType]]):
    model_config = STRICT


class NodeEntry(FileEntry):
    """A node, or ``count`` nodes.

    A ``{}`` in the name or the rack is replaced by a number that starts at 0.
    """

    shown: ClassVar = (
        "etag",
        "state",
        "free_gpus",
        "jobs",
        "silent_s",
        "network_remarks",
        "drain_reason",
        "drained_by",
        "faults",
        "probation_end_time",
        "drain_time",
        "drained",
        "reported_cpus",
        "reported_host_bytes",
        "agent_labels",
        "runtimes",
        "tools",
    )
    """Further keys that `tessera nodes -o yaml` prints. They are ignored, except for the etag."""

    name: Text
    count: Annotated[int, whole_between(1, limits.MAX_NODES)] = 1
    gpu_type: Text
    gpus: Annotated[int, whole_between(1, limits.MAX_GPUS_PER_NODE)]
    rack: Text = ""
    nodes_per_rack: Annotated[int, whole_between(1, limits.MAX_NODES)] = 1
    cpus: Annotated[int, whole_between(0, limits.MAX_CPUS_PER_NODE)] | None = None
    host_memory: Size | None = None
    host_bytes: Bytes | None = None
    """The same as ``host_memory``, as `tessera nodes -o yaml` prints it."""
    labels: Labels = Field(default_factory=dict)
    etag: Text = ""


def _without_count(nodes: object) -> object:
    """Drop the number of nodes that `cluster get` prints. In proto JSON it is a text."""
    return [] if isinstance(nodes, str) and nodes.isdecimal() else nodes


class ClusterEntry(FileEntry):
    """The single document of a cluster file."""

    shown: ClassVar = (
        "etag",
        "create_time",
        "gpus",
        "last_round",
        "next_round_time",
        "round_period",
    )
    """Further keys that `tessera cluster get -o yaml` prints, ignored except for the etag."""

    name: Text = ""
    gpu_types: object = None
    nodes: Annotated[list[NodeEntry], BeforeValidator(_without_count)] = Field(default_factory=list)
    tenants: object = None
    etag: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A cluster as a file describes it.

    ``name`` is empty if the file does not give it. It and the nodes' names are ids or full names.
    ``etag`` is the one that the stored cluster must have, or empty.
    """

    name: str
    gpu_types: tuple[GpuType, ...]
    nodes: tuple[Node, ...]
    tenants: tuple[Tenant, ...] = ()
    etag: str = ""


EXAMPLE_CLUSTER: Final = """\
gpu_types:
  a100: 40GiB
  v100: 32GiB
nodes:
  - {name: "a100-{}", count: 4, gpu_type: a100, gpus: 4, rack: rack-0}
  - {name: "v100-{}", count: 1, gpu_type: v100, gpus: 16, rack: rack-1}
"""
"""The cluster that ``tessera up`` starts if no file is named."""


def read_cluster(text: str, source: str) -> ClusterFile:
    """Return the cluster in a file, hand-written or printed by `cluster get -o yaml`.

    Raises:
        InvalidInput: names the file, the place and the key, and says what is allowed.
    """
    contents = read_documents(text, source)
    if len(contents) != 1:
        raise InvalidInput(source, f"must contain one cluster, not {len(contents)}")
    top = check_value(ClusterEntry, source, contents[0])
    types = tuple(_gpu_types(f"{source}: gpu_types", top.gpu_types))
    if not types:
        raise InvalidInput(
            f"{source}: gpu_types", "must name at least one type, e.g. {a100: 40GiB}"
        )
    known = [kind.name for kind in types]
    if (count := sum(entry.count for entry in top.nodes)) > limits.MAX_NODES:
        raise InvalidInput(
            f"{source}: nodes",
            f"has {count:,} nodes, and may have {limits.MAX_NODES:,}; lower the counts",
        )
    nodes: dict[str, Node] = {}
    for index, entry in enumerate(top.nodes):
        for node in _nodes(f"{source}: nodes[{index}]", entry, known):
            if short_name(node.name) in nodes:
                raise InvalidInput(
                    f"{source}: nodes", f"the node {short_name(node.name)} occurs twice"
                )
            nodes[short_name(node.name)] = node
    tenants = tuple(tenantfile.tenants_of(f"{source}: tenants", top.tenants))
    for tenant in tenants:
        for kind in tenant.quotas:
            if kind not in ("", *known):
                where = f"{source}: tenants: {tenant.name}: quotas"
                raise InvalidInput(
                    where,
                    f"unknown GPU type {kind!r}; must be one of {', '.join((*known, ANY_TYPE))}",
                )
    return ClusterFile(
        name=top.name, gpu_types=types, nodes=tuple(nodes.values()), tenants=tenants, etag=top.etag
    )


def _gpu_types(where: str, value: object) -> Iterator[GpuType]:
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        yield from _printed_gpu_types(where, value)
        return
    if not isinstance(value, dict):
        raise InvalidInput(where, "must map GPU types to their memory, e.g. {a100: 40GiB}")
    for key, settings in value.items():
        name = str(text_of(key))
        at = f"{where}: {name}"
        if not isinstance(settings, dict):
            yield GpuType(name=name, memory_bytes=options.size_bytes(at, str(text_of(settings))))
            continue
        kind = check_value(GpuTypeEntry, at, settings)
        yield GpuType(
            name=name,
            memory_bytes=kind.memory,
            dollars_per_hour=kind.dollars_per_hour,
            watts=kind.watts,
        )


def _printed_gpu_types(where: str, items: list[object]) -> Iterator[GpuType]:
    """Yield GPU types as `cluster get -o yaml` prints them: a list, with the memory in bytes."""
    seen: set[str] = set()
    for index, kind in enumerate(check_value(_PrintedGpuTypes, where, items).root):
        if kind.name in seen:
            raise InvalidInput(f"{where}[{index}]: name", f"the type {kind.name} occurs twice")
        seen.add(kind.name)
        yield GpuType(
            name=kind.name,
            memory_bytes=kind.memory_bytes,
            dollars_per_hour=kind.dollars_per_hour,
            watts=kind.watts,
        )


def _nodes(where: str, entry: NodeEntry, known: list[str]) -> Iterator[Node]:
    """Yield the nodes of one entry."""
    if entry.gpu_type not in known:
        problem = f"unknown GPU type {entry.gpu_type!r}; must be one of {', '.join(known)}"
        raise InvalidInput(f"{where}: gpu_type", problem)
    if entry.count > 1 and "{}" not in entry.name:
        problem = f"must contain {{}} for the number, e.g. '{entry.name}-{{}}'"
        raise InvalidInput(f"{where}: name", problem)
    if entry.host_memory is not None and entry.host_bytes is not None:
        raise InvalidInput(f"{where}: host_memory", "is the same as 'host_bytes', so give only one")
    for i in range(entry.count):
        yield Node(
            name=entry.name.replace("{}", str(i)),
            gpu_type=entry.gpu_type,
            gpus=entry.gpus,
            rack=entry.rack.replace("{}", str(i // entry.nodes_per_rack)),
            cpus=entry.cpus,
            host_bytes=entry.host_bytes if entry.host_memory is None else entry.host_memory,
            etag=entry.etag,
            labels=entry.labels,
        )
