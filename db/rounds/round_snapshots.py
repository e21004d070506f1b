"""The storage of rounds' snapshots: some whole, the others as their difference from a whole one.

Both forms restore the canonical JSON of ``tessera.formulation.answer.codec`` byte by byte, so its digest
stays valid.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from tessera.db.base.deltas import decode_delta, encode_delta
from tessera.formulation.answer import codec
from tessera.formulation.base.errors import NotAllowed, NotFound
from tessera.formulation.state.snapshot import Snapshot

MAX_ROUNDS_APART: Final = 16
"""Age in rounds of the last whole snapshot at which the next one is stored whole. Snapshots become
less similar over time.
"""

MIN_BASE_BYTES: Final = 4 << 10
"""Size of a whole snapshot below which no differences from it are stored. They would not save
enough to be worth reading a second row.
"""

MAX_DELTA_SHARE: Final = 1 / 3
"""Share of the last whole snapshot's size above which a difference is not used and the snapshot is
stored whole.
"""

_LATEST_WHOLE = sa.text("""
SELECT r.number, r.snapshot FROM rounds r JOIN clusters c ON c.id = r.cluster_id
WHERE c.name = :name AND r.number > c.last_round - :apart AND r.base IS NULL AND r.snapshot IS NOT NULL
ORDER BY r.number DESC LIMIT 1
""")

_IS_WHOLE = sa.text("""
SELECT FROM rounds
WHERE cluster_id = :cluster AND number = :number AND base IS NULL AND snapshot IS NOT NULL
""")

_SNAPSHOT = sa.text("""
SELECT r.snapshot, r.base, b.snapshot AS whole
FROM rounds r JOIN clusters c ON c.id = r.cluster_id
LEFT JOIN rounds b ON b.cluster_id = r.cluster_id AND b.number = r.base
WHERE c.name = :name AND r.number = :number
""")


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot as stored in a round's row.

    ``base`` is the round that it is a difference from, or None if it is stored whole.
    """

    document: bytes
    base: int | None


@dataclass(frozen=True, slots=True)
class BaseSnapshot:
    """A round whose snapshot is stored whole."""

    number: int
    document: bytes


def read_base(connection: sa.Connection, cluster: str) -> BaseSnapshot | None:
    """Return the whole snapshot for the next round's difference, or None if none is stored."""
    values = {"name": cluster, "apart": MAX_ROUNDS_APART - 1}
    row = connection.execute(_LATEST_WHOLE, values).one_or_none()
    return None if row is None else BaseSnapshot(row.number, bytes(row.snapshot))


def pack_snapshot(base: BaseSnapshot | None, encoded: bytes) -> StoredSnapshot:
    """Return a snapshot's canonical JSON in its stored form."""
    if base is not None and len(base.document) >= MIN_BASE_BYTES:
        delta = encode_delta(zlib.decompress(base.document), encoded)
        if len(delta) <= MAX_DELTA_SHARE * len(base.document):
            return StoredSnapshot(delta, base.number)
    return pack_whole(encoded)


def pack_whole(encoded: bytes) -> StoredSnapshot:
    """Return a snapshot that is stored whole: zlib at its fastest."""
    return StoredSnapshot(zlib.compress(encoded, level=1), None)


def has_base(connection: sa.Connection, cluster: int, stored: StoredSnapshot) -> bool:
    """Return whether the stored snapshot can be read. Its base may have been deleted since."""
    if stored.base is None:
        return True
    values = {"cluster": cluster, "number": stored.base}
    return connection.execute(_IS_WHOLE, values).one_or_none() is not None


def round_snapshot(connection: sa.Connection, cluster: str, number: int) -> Snapshot:
    """Return the snapshot that a round was decided on.

    Raises NotFound, NotAllowed (no longer kept).
    """
    row = connection.execute(_SNAPSHOT, {"name": cluster, "number": number}).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{cluster}/rounds/{number}")
    if row.snapshot is None:
        raise NotAllowed(
            f"the snapshot of clusters/{cluster}/rounds/{number} is no longer kept; choose a later round, or"
            " raise the setting retain_snapshots"
        )
    if row.base is None:
        encoded = zlib.decompress(row.snapshot)
    else:
        encoded = decode_delta(zlib.decompress(row.whole), bytes(row.snapshot))
    snapshot = codec.decode(encoded)
    if not isinstance(snapshot, Snapshot):
        raise AssertionError("a round's record holds something other than a snapshot")
    return snapshot
