"""The token on each call: by credentials over TLS, by interceptors in plain text on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio

from tessera.client.refusals import ChannelRefused


class _CallDetails(NamedTuple):
    """The details of a call, as gRPC passes them to interceptors."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class TokenPlugin(grpc.AuthMetadataPlugin):
    """The credentials that add the token to every call of a channel with TLS."""

    def __init__(self, find_token: Callable[[], str]) -> None:
        self._find_token = find_token

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        """Give gRPC the token of a call, or the reason why there is none."""
        try:
            token = self._find_token()
        except ChannelRefused as error:
            callback((), error)
        else:
            callback((("authorization", f"Bearer {token}"),), None)


class TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """An interceptor that adds the token to every call of a channel."""

    def __init__(self, find_token: Callable[[], str]) -> None:
        self._find_token = find_token

    def _add_token(self, details: Any) -> _CallDetails:
        header = ("authorization", f"Bearer {self._find_token()}")
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), header],
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """Add the token to a call."""
        return continuation(self._add_token(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        """Add the token to a call whose answer is a stream."""
        return continuation(self._add_token(details), request)

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Add the token to a call whose request is a stream."""
        return continuation(self._add_token(details), requests)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Add the token to a call of two streams."""
        return continuation(self._add_token(details), requests)


class _AioToken:
    """The part that the interceptors of grpc.aio share. grpc.aio wants one for each kind of call."""

    def __init__(self, find_token: Callable[[], str]) -> None:
        self._find_token = find_token

    def add_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        """Return the details of a call with the token."""
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add("authorization", f"Bearer {self._find_token()}")
        return grpc.aio.ClientCallDetails(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            details.wait_for_ready,
        )


class _AioUnaryUnary(_AioToken, grpc.aio.UnaryUnaryClientInterceptor):
    """The interceptor of calls without streams."""

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """Add the token to a call."""
        return await continuation(self.add_token(details), request)


class _AioUnaryStream(_AioToken, grpc.aio.UnaryStreamClientInterceptor):
    """The interceptor of calls whose answer is a stream."""

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        """Add the token to a call."""
        return await continuation(self.add_token(details), request)


class _AioStreamUnary(_AioToken, grpc.aio.StreamUnaryClientInterceptor):
    """The interceptor of calls whose request is a stream."""

    async def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Add the token to a call."""
        return await continuation(self.add_token(details), requests)


class _AioStreamStream(_AioToken, grpc.aio.StreamStreamClientInterceptor):
    """The interceptor of calls of two streams."""

    async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Add the token to a call."""
        return await continuation(self.add_token(details), requests)


def aio_interceptors(find_token: Callable[[], str]) -> list[grpc.aio.ClientInterceptor]:
    """Return the interceptors of a channel of grpc.aio."""
    kinds = (_AioUnaryUnary, _AioUnaryStream, _AioStreamUnary, _AioStreamStream)
    return [kind(find_token) for kind in kinds]
