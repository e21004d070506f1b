"""Request ids: a repeated call gets its first answer again, without repeating its work."""

from __future__ import annotations

import sqlalchemy as sa

from tessera.formulation.base.errors import RequestIdReused
from tessera.formulation.records.store import Request

_CLAIM = sa.text("""
INSERT INTO request_ids (id, method, digest, response)
VALUES (:id, :method, :digest, :response)
ON CONFLICT DO NOTHING
""")  # waits for a concurrent duplicate to end

_FIND = sa.text("SELECT method, digest, response FROM request_ids WHERE id = :id")

_ANSWER = sa.text("UPDATE request_ids SET response = :response WHERE id = :id")


def claim_request(
    connection: sa.Connection, request: Request, response: bytes | None = None
) -> bytes | None:
    """Claim the id for this transaction, or return the answer that the request got before.

    ``response`` is the answer if it is known already. If it is None, ``store_answer`` stores it later.

    Raises:
        RequestIdReused: the id was used with another method or body.
    """
    values = {
        "id": request.id,
        "method": request.method,
        "digest": request.digest,
        "response": response,
    }
    if connection.execute(_CLAIM, values).rowcount:
        return None
    stored = find_answer(connection, request)
    if stored is None:
        raise AssertionError("a request id was kept without its answer")
    return stored


def find_answer(connection: sa.Connection, request: Request) -> bytes | None:
    """Return the answer that the request got before, or None. Raises RequestIdReused."""
    row = connection.execute(_FIND, {"id": request.id}).one_or_none()
    if row is None or row.response is None:
        return None
    if (row.method, row.digest) != (request.method, request.digest):
        raise RequestIdReused(
            "request_id", f"{request.id} was used for another request; use a new id for each"
        )
    return bytes(row.response)


def store_answer(connection: sa.Connection, request: Request, response: bytes) -> None:
    """Store the answer, to be committed with the work."""
    connection.execute(_ANSWER, {"id": request.id, "response": response})
