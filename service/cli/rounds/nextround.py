"""The time of a cluster's next round, as its server reports it."""

from __future__ import annotations

from typing import Final

from tessera.client import CallError, Client
from tessera.service.cli.client import current_timestamp
from tessera.service.cli.render import format_span, format_time
from tessera.v1 import clusters_pb2

SOON_S: Final = 10.0
"""Seconds within which a due round begins. A server checks every few seconds."""


def next_round(client: Client, cluster: str) -> str:
    """Return the time of the cluster's next round, or "" if the server does not report it.

    The result is only added to other output, so a failure of the call is not an error.
    """
    try:
        stored = client.call(
            client.stubs.clusters.GetCluster, clusters_pb2.GetClusterRequest(name=cluster)
        )
    except CallError:
        return ""
    if not stored.HasField("round_period"):
        return ""
    if not stored.HasField("next_round_time"):
        return "only on request (`tessera round`), because the server runs none on its own"
    left_s = (stored.next_round_time.ToNanoseconds() - current_timestamp().ToNanoseconds()) / 1e9
    if left_s < SOON_S:
        return "within seconds"
    return f"in {format_span(left_s)} at the latest ({format_time(stored.next_round_time)})"


def next_round_line(client: Client, cluster: str) -> str:
    """Return a sentence about the cluster's next round, or "" if the server does not report it."""
    text = next_round(client, cluster)
    return f"next round: {text}" if text else ""
