"""All methods that a server has, from the descriptors of its services."""

from __future__ import annotations

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from tessera.service.server.rpc.serving.servicers import SERVICES


def methods_of(*services: str) -> dict[str, MethodDescriptor]:
    """Return the methods of services, by path, e.g. ``/tessera.v1.Jobs/GetJob``."""
    pool = descriptor_pool.Default()
    found = (pool.FindServiceByName(name) for name in services)
    return {f"/{s.full_name}/{method.name}": method for s in found for method in s.methods}


def all_methods() -> dict[str, MethodDescriptor]:
    """Return all methods of a server, by path."""
    return methods_of(*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
