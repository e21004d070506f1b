"""The storage of rounds' proofs: compressed JSON, as long as the round is kept."""

from __future__ import annotations

import json
import zlib

import sqlalchemy as sa

from tessera.db.base.documents import dump_json, from_plain_json, to_plain_json
from tessera.formulation.answer.proofs import NO_PROOF, RoundProof, proof_from_plain, proof_to_plain
from tessera.formulation.base.errors import NotFound

_PROOF = sa.text("""
SELECT r.proof FROM rounds r JOIN clusters c ON c.id = r.cluster_id
WHERE c.name = :name AND r.number = :number
""")


def pack_proof(proof: RoundProof) -> bytes | None:
    """Return the proof in its stored form, or None if there is nothing to store."""
    if not proof.has_certificate and not proof.recorded:
        return None
    return zlib.compress(dump_json(to_plain_json(proof_to_plain(proof))).encode(), level=1)


def round_proof(connection: sa.Connection, cluster: str, number: int) -> RoundProof:
    """Return what is kept of the proof of a round. Raises NotFound."""
    row = connection.execute(_PROOF, {"name": cluster, "number": number}).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{cluster}/rounds/{number}")
    if row.proof is None:
        return NO_PROOF
    return proof_from_plain(from_plain_json(json.loads(zlib.decompress(row.proof))))
