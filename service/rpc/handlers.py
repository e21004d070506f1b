"""Handlers of methods, taken apart and put together again by interceptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

Behaviour = Callable[[Any, Any], Any]
"""What a method does: from a request, or the requests, and the context to an answer, or the answers."""

Parse = Callable[[bytes], Any]


def rewrapped(
    handler: grpc.RpcMethodHandler[Any, Any],
    unary: Callable[[Behaviour], Behaviour],
    stream: Callable[[Behaviour], Behaviour],
    parse: Parse | None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that does what ``unary`` makes of one answer, or ``stream`` of a stream of them.

    ``parse`` reads its requests; None: it is given their bytes.

    Raises:
        NotImplementedError: the method takes a stream and gives one answer.
    """
    codecs = (parse, handler.response_serializer)
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), *codecs)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(stream(handler.unary_stream), *codecs)
    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(stream(handler.stream_stream), *codecs)
    raise NotImplementedError("no method here takes a stream and gives one answer")
