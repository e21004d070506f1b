"""The time of a cluster's next round, as its server reports it."""

from __future__ import annotations

from typing import Final

from tessera.service.cli.client import CallFailed, Client, now
from tessera.service.cli.render import at, span
from tessera.v1 import clusters_pb2

SOON_S: Final = 10.0
"""Seconds within which a due round begins. Servers check every few seconds."""


def next_round(client: Client, cluster: str) -> str:
    """Return when the cluster's next round is, or "" if the server does not report it.

    The call follows an output or a submission, so its failure is not an error.
    """
    try:
        found = client.call(
            client.clusters.GetCluster, clusters_pb2.GetClusterRequest(name=cluster)
        )
    except CallFailed:
        return ""
    if not found.HasField("round_period"):
        return ""
    if not found.HasField("next_round_time"):
        return "only when asked (`tessera round`): the server begins none"
    left_s = (found.next_round_time.ToNanoseconds() - now().ToNanoseconds()) / 1e9
    if left_s < SOON_S:
        return "within seconds"
    return f"in {span(left_s)} at the latest ({at(found.next_round_time)})"


def next_round_line(client: Client, cluster: str) -> str:
    """Return a sentence about the cluster's next round, or "" if the server does not report it."""
    text = next_round(client, cluster)
    return f"next round: {text}" if text else ""
