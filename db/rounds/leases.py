"""Leases: the right of one replica of the server to attend to a cluster, until it fails to renew it."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

_LEASE = sa.text("""
INSERT INTO leases AS l (cluster_id, holder, expires_at)
SELECT c.id, :holder, clock_timestamp() + make_interval(secs => :ttl_s) FROM clusters c
WHERE c.name = :cluster
ON CONFLICT (cluster_id) DO UPDATE SET holder = excluded.holder, expires_at = excluded.expires_at
    WHERE l.holder = excluded.holder OR l.expires_at < clock_timestamp()
        OR l.expires_at > clock_timestamp() + make_interval(secs => :ttl_s + :margin_s)
""")
"""The statement that takes or renews a lease.

A lease that lasts longer than any valid one was taken before the database's clock was set back.
"""

_MARGIN_S: Final = 60.0
"""Seconds by which leases of other releases and settings may last longer than ours."""


def acquire_lease(connection: sa.Connection, cluster: str, holder: str, ttl_s: float) -> bool:
    """Take or renew a lease for ``ttl_s`` seconds; return whether ``holder`` has it."""
    values = {"cluster": cluster, "holder": holder, "ttl_s": ttl_s, "margin_s": _MARGIN_S}
    return connection.execute(_LEASE, values).rowcount > 0
