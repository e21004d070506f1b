"""Cluster files: GPU types, nodes and tenants as YAML; ``service/cli/README.md`` has the format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import limits, options, tenantfile
from tessera.service.cli.names import short
from tessera.service.cli.yamlfile import Mapping, documents
from tessera.v1.clusters_pb2 import GpuType, Node
from tessera.v1.tenants_pb2 import Tenant

KEYS: Final = ("name", "gpu_types", "nodes", "tenants")
SHOWN_KEYS: Final = (
    "etag", "create_time", "gpus", "last_round", "next_round_time", "round_period",
)  # fmt: skip
"""Keys that `tessera cluster get -o yaml` prints besides; but for the etag they are not read."""

GPU_TYPE_KEYS: Final = ("memory", "dollars_per_hour", "watts")
SHOWN_GPU_TYPE_KEYS: Final = ("name", "memory_bytes", "dollars_per_hour", "watts", "node_gpus")
MAX_NODES: Final = 100_000
NODE_KEYS: Final = ("name", "count", "gpu_type", "gpus", "rack", "nodes_per_rack")
SHOWN_NODE_KEYS: Final = (
    "etag", "state", "free_gpus", "jobs", "silent_s", "network_remarks", "drain_reason", "drained_by",
    "drain_time", "drained",
)  # fmt: skip
"""Keys that `tessera nodes -o yaml` prints besides; but for the etag they are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A cluster as a file describes it.

    ``name`` is empty where the file leaves it open; it and nodes' names are ids or full names. ``etag`` is
    empty, or the one that the stored cluster must have.
    """

    name: str
    gpu_types: tuple[GpuType, ...]
    nodes: tuple[Node, ...]
    tenants: tuple[Tenant, ...] = ()
    etag: str = ""


DEFAULT: Final = """\
gpu_types:
  a100: 40GiB
  v100: 32GiB
nodes:
  - {name: "a100-{}", count: 4, gpu_type: a100, gpus: 4, rack: rack-0}
  - {name: "v100-{}", count: 1, gpu_type: v100, gpus: 16, rack: rack-1}
"""
"""What ``tessera up`` starts where no file is named."""


def read_cluster(text: str, source: str) -> ClusterFile:
    """Return the cluster that a file describes: one that people wrote, or `cluster get -o yaml` printed.

    Raises:
        InvalidInput: names the file, the place and the key, and says what is allowed.
    """
    found = documents(text, source)
    if len(found) != 1:
        raise InvalidInput(source, f"must hold one cluster, not {len(found)}")
    top = Mapping(source, found[0], KEYS, SHOWN_KEYS)
    types = tuple(_gpu_types(top))
    if not types:
        raise InvalidInput(top.at("gpu_types"), "name at least one, e.g. {a100: 40GiB}")
    known = [kind.name for kind in types]
    listed = [] if _is_count(top.raw("nodes")) else top.items("nodes")
    nodes = tuple(node for at, item in listed for node in _nodes(at, item, known))
    seen: set[str] = set()
    for node in nodes:
        if short(node.name) in seen:
            raise InvalidInput(top.at("nodes"), f"the node {short(node.name)} occurs twice")
        seen.add(short(node.name))
    tenants = tuple(tenantfile.tenants_of(top))
    for tenant in tenants:
        for kind in tenant.quotas:
            if kind not in ("", *known):
                where = f"{top.at('tenants')}: {tenant.name}: quotas"
                choices = ", ".join((*known, tenantfile.ANY))
                raise InvalidInput(where, f"{kind!r} is not among {choices}")
    return ClusterFile(
        name=top.text("name"), gpu_types=types, nodes=nodes,
        tenants=tenants, etag=top.text("etag"),
    )  # fmt: skip


def _is_count(nodes: object) -> bool:
    """Return whether it is the number of nodes that `cluster get` prints: proto JSON has it as a text."""
    return isinstance(nodes, str) and nodes.isdecimal()


def _gpu_types(top: Mapping) -> Iterator[GpuType]:
    value = top.raw("gpu_types")
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        yield from _shown_gpu_types(top)
        return
    if not isinstance(value, dict):
        raise InvalidInput(top.at("gpu_types"), "must map types to memory, e.g. {a100: 40GiB}")
    for name, said in value.items():
        where = f"{top.at('gpu_types')}: {name}"
        if not isinstance(said, dict):
            yield GpuType(name=str(name), memory_bytes=options.size_bytes(where, str(said)))
            continue
        kind = Mapping(where, said, GPU_TYPE_KEYS)
        if "memory" not in kind:
            raise InvalidInput(where, "needs 'memory', e.g. 40GiB")
        yield GpuType(
            name=str(name), memory_bytes=options.size_bytes(kind.at("memory"), kind.text("memory")),
            dollars_per_hour=kind.real("dollars_per_hour", 0.0, limits.MAX_DOLLARS_PER_HOUR),
            watts=kind.real("watts", 0.0, limits.MAX_WATTS),
        )  # fmt: skip


def _shown_gpu_types(top: Mapping) -> Iterator[GpuType]:
    """Yield GPU types as `cluster get -o yaml` prints them: a list, with their memory in bytes."""
    seen: set[str] = set()
    for where, item in top.items("gpu_types"):
        kind = Mapping(where, item, SHOWN_GPU_TYPE_KEYS)
        for key in ("name", "memory_bytes"):
            if key not in kind:
                raise InvalidInput(where, f"needs {key!r}")
        name = kind.text("name")
        if name in seen:
            raise InvalidInput(kind.at("name"), f"the type {name} occurs twice")
        seen.add(name)
        yield GpuType(
            name=name,
            memory_bytes=options.size_bytes(kind.at("memory_bytes"), kind.text("memory_bytes")),
            dollars_per_hour=kind.real("dollars_per_hour", 0.0, limits.MAX_DOLLARS_PER_HOUR),
            watts=kind.real("watts", 0.0, limits.MAX_WATTS),
        )


def _nodes(where: str, item: object, known: list[str]) -> Iterator[Node]:
    """Yield the nodes of one entry; ``{}`` in a name or rack stands for the number from 0."""
    entry = Mapping(where, item, NODE_KEYS, SHOWN_NODE_KEYS)
    name, gpu_type, rack = entry.text("name"), entry.text("gpu_type"), entry.text("rack")
    count = entry.whole("count", 1, MAX_NODES) if "count" in entry else 1
    per_rack = entry.whole("nodes_per_rack", 1, MAX_NODES) if "nodes_per_rack" in entry else 1
    for key in ("name", "gpu_type", "gpus"):
        if key not in entry:
            raise InvalidInput(where, f"needs {key!r}")
    if gpu_type not in known:
        raise InvalidInput(entry.at("gpu_type"), f"{gpu_type!r} is not among {', '.join(known)}")
    if count > 1 and "{}" not in name:
        raise InvalidInput(entry.at("name"), f"must hold {{}} for the number, e.g. '{name}-{{}}'")
    gpus = entry.whole("gpus", 1, limits.MAX_GPUS_A_NODE)
    for i in range(count):
        yield Node(
            name=name.replace("{}", str(i)), gpu_type=gpu_type, gpus=gpus,
            rack=rack.replace("{}", str(i // per_rack)), etag=entry.text("etag"),
        )  # fmt: skip
