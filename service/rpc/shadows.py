"""The calls on shadows of tessera.v1.Scheduler."""

from __future__ import annotations

from typing import Final

from tessera.formulation.access import IDENTITY
from tessera.formulation.errors import NotFound
from tessera.formulation.records.policies import MAX_MESSAGE
from tessera.service.deciding import require_known_options
from tessera.service.ports.store import Store
from tessera.service.ports.writer import Writer
from tessera.service.rpc import fields, names
from tessera.service.rpc.convert import shadows as convert
from tessera.service.rpc.convert.policies import stored_options
from tessera.service.rpc.convert.rounds import to_options
from tessera.service.rpc.policies import MAX_SUBJECT
from tessera.service.shadow_comparison import compare_rounds
from tessera.service.standing_policy import StandingPolicies
from tessera.v1 import scheduler_pb2 as pb

DEFAULT_WINDOW_S: Final = 7 * 86_400.0
MAX_WINDOW_S: Final = 3.2e9  # a century
MAX_ROUNDS: Final = 1000
HIDDEN_PROBLEM: Final = "the shadow failed; operators see why"
"""The problem of a shadow as callers that are bound to tenants read it. It may name any job."""


class ShadowCalls:
    """The calls that set, compare and delete the shadows of clusters. They block."""

    def __init__(self, store: Store, policies: StandingPolicies) -> None:
        self._store, self._policies = store, policies

    def set(self, request: pb.SetShadowRequest) -> pb.Shadow:
        """Set the shadow of a cluster."""
        cluster = names.parse_cluster("parent", request.parent)
        message = fields.require_text("message", request.message, MAX_MESSAGE)
        effective = to_options("options", request.options, self._policies.usual)
        require_known_options(effective, commits=False)
        options = stored_options(request.options)
        key = fields.request_key(request, request.request_id)

        def work(writer: Writer) -> bytes:
            record = writer.set_shadow(
                cluster, options, set_by=IDENTITY.get().known_subject(MAX_SUBJECT), message=message
            )
            return convert.of_shadow(cluster, record, effective).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.Shadow.FromString(kept)

    def get(self, request: pb.GetShadowRequest) -> pb.GetShadowResponse:
        """Compare the shadow of a cluster with the rounds."""
        cluster = names.parse_shadow("name", request.name)
        most = fields.require_whole("rounds", request.rounds, 0, MAX_ROUNDS)
        window_s = DEFAULT_WINDOW_S
        if request.HasField("window"):
            window_s = min(fields.seconds_of_duration("window", request.window), MAX_WINDOW_S)
        rounds = self._store.list_shadow_rounds(cluster, window_s)
        record = self._store.find_shadow(cluster)
        if record is None:  # it was deleted in the meantime
            raise NotFound(names.shadow_name(cluster))
        shadow = convert.of_shadow(cluster, record, self._policies.read_shadow(record.options))
        answer = convert.of_comparison(cluster, shadow, compare_rounds(rounds), rounds[:most])
        if IDENTITY.get().tenants is not None:
            _hide_problems(answer)
        return answer

    def delete(self, request: pb.DeleteShadowRequest) -> pb.DeleteShadowResponse:
        """Delete the shadow of a cluster with its rounds."""
        cluster = names.parse_shadow("name", request.name)
        key = fields.request_key(request, request.request_id)

        def work(writer: Writer) -> bytes:
            writer.drop_shadow(cluster, allow_missing=request.allow_missing)
            return pb.DeleteShadowResponse().SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.DeleteShadowResponse.FromString(kept)


def _hide_problems(answer: pb.GetShadowResponse) -> None:
    if answer.problem:
        answer.problem = HIDDEN_PROBLEM
    for decided in answer.rounds:
        if decided.problem:
            decided.problem = HIDDEN_PROBLEM
