"""A control server that only answers health checks, which shows the delays of the machine itself.

``python -m tessera.benchmarks.service.hostile.bare ADDRESS`` serves until it is ended.
"""

from __future__ import annotations

import asyncio
import sys

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


async def serve_health(address: str) -> None:
    """Answer health checks at the address."""
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve_health(sys.argv[1]))
