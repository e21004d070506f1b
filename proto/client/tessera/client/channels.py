"""The only functions that open a channel to a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from tessera.client.settings import ChannelSettings, find_settings


def open_channel(
    address: str, settings: ChannelSettings | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Open a channel to ``address``, with the settings of the environment unless others are given."""
    settings = settings or find_settings(address, os.environ)
    return grpc.insecure_channel(address, options=list(options))


def open_async_channel(
    address: str, settings: ChannelSettings | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """Open a channel of grpc.aio like ``open_channel``."""
    settings = settings or find_settings(address, os.environ)
    return grpc.aio.insecure_channel(address, options=list(options))
