"""A gRPC server of a test that answers by the test's own servicers, with nothing behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from tests.support.patience import PATIENCE_S


@contextmanager
def serve_grpc(register: Callable[[grpc.Server], None]) -> Iterator[str]:
    """Run a server to which ``register`` adds its servicers, and yield its address."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait(PATIENCE_S)
