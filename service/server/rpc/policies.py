"""The calls on standing policies of tessera.v1.Scheduler."""

from __future__ import annotations

from tessera.db.clusters.policies import get_policy, list_policies, newest_policy, set_policy
from tessera.db.store.reads import get_cluster
from tessera.db.store.store import Connection, Store
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.policies import MAX_MESSAGE, PolicyRecord
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert import policies as convert
from tessera.service.server.convert.rounds import to_options
from tessera.service.server.rounds.deciding import require_known_options
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.service.server.rpc.paging import page_of
from tessera.v1 import scheduler_pb2 as pb

MAX_VERSION = 2**53
MAX_SUBJECT = 200
"""Characters that are kept of the name of who set a policy."""


class PolicyCalls:
    """The calls that set and read the standing policies of clusters. They block."""

    def __init__(self, store: Store, policies: StandingPolicies) -> None:
        self._store, self._policies = store, policies

    def set(self, request: pb.SetPolicyRequest) -> pb.StandingPolicy:
        """Add a version of the policy."""
        cluster = names.parse_cluster("parent", request.parent)
        message = fields.require_text("message", request.message, MAX_MESSAGE)
        version = fields.version_of(request.etag)
        key = fields.request_key(request, request.request_id)
        if request.HasField("restore_version"):
            options = self._earlier_options(cluster, request)
        else:
            require_known_options(
                to_options("options", request.options, self._policies.usual), commits=True
            )
            options = convert.stored_options(request.options)

        def work(connection: Connection) -> bytes:
            record = set_policy(
                connection,
                cluster,
                options,
                set_by=IDENTITY.get().known_subject(MAX_SUBJECT),
                message=message,
                version=version,
            )
            return self._message(cluster, record).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.StandingPolicy.FromString(kept)

    def get(self, request: pb.GetPolicyRequest) -> pb.StandingPolicy:
        """Return the version in force, or the one that the request names."""
        cluster = names.parse_cluster("parent", request.parent)
        if request.HasField("version"):
            version = fields.require_whole("version", request.version, 0, MAX_VERSION)
            record = self._store.read(get_policy, cluster, version) if version else None
        else:
            record = self._store.read(newest_policy, cluster)
        if record is None:
            self._store.read(get_cluster, cluster)  # it must exist
            return convert.of_configured(cluster, self._policies.configured, self._policies.usual)
        return self._message(cluster, record)

    def list(self, request: pb.ListPoliciesRequest) -> pb.ListPoliciesResponse:
        """Return a page of the versions that were set, newest first."""
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=1000, counts=True)
        found = self._store.read(list_policies, cluster, page.number, page.size + 1)
        last = found[page.size - 1].version if len(found) > page.size else 0
        shown = [self._message(cluster, record) for record in found[: page.size]]
        return pb.ListPoliciesResponse(policies=shown, next_page_token=page.token(last))

    def _earlier_options(
        self, cluster: str, request: pb.SetPolicyRequest
    ) -> dict[str, object] | None:
        """Return the stored options of the version that the request goes back to."""
        if request.HasField("options"):
            raise InvalidInput("options", "cannot be set together with restore_version")
        version = fields.require_whole("restore_version", request.restore_version, 0, MAX_VERSION)
        if not version:
            return None
        record = self._store.read(get_policy, cluster, version)
        require_known_options(self._policies.read(version, record.options), commits=True)
        return None if record.options is None else dict(record.options)

    def _message(self, cluster: str, record: PolicyRecord) -> pb.StandingPolicy:
        effective = self._policies.read(record.version, record.options)
        return convert.of_policy(cluster, record, effective, self._policies.usual)
