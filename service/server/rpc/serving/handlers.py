"""Wrappers around the handlers of methods, for interceptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

Behaviour = Callable[[Any, Any], Any]
"""The function of a method: from a request or an iterator of them, and the context, to an answer or
a stream of them.
"""

Parse = Callable[[bytes], Any]


def rewrap_handler(
    handler: grpc.RpcMethodHandler[Any, Any],
    unary: Callable[[Behaviour], Behaviour],
    stream: Callable[[Behaviour], Behaviour],
    parse: Parse | None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler with its behaviour wrapped in ``unary`` or, for a stream, ``stream``.

    ``parse`` reads its requests. If it is None, the behaviour receives their bytes.

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
