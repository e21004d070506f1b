"""Tokens, join tokens and certificates in PostgreSQL: what they allow, and until when."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from tessera.db.access import enrolment
from tessera.db.access.enrolment import (
    add_certificate,
    create_join_token,
    find_revoked,
    list_certificates,
    list_join_tokens,
    revoke_agent,
    revoke_join_token,
)
from tessera.db.access.tokens import (
    ACCESS_CHANNEL,
    create_token,
    find_token,
    list_tokens,
    revoke_token,
)
from tessera.db.base import limits
from tessera.db.clusters import deletion
from tessera.db.clusters.tenants import tenants_of_jobs
from tessera.db.schema.engine import Database, connect_database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.notify import EVERY_CLUSTER, Listener
from tessera.db.store.reads import get_cluster
from tessera.db.store.store import Store
from tessera.db.upkeep.purge import purge_batch
from tessera.formulation.base.access import Role
from tessera.formulation.base.errors import (
    AlreadyExists,
    InvalidInput,
    LimitReached,
    NotAuthenticated,
    NotFound,
    PermissionDenied,
)
from tessera.formulation.base.secrets import SecretToken, hash_secret
from tessera.formulation.records.store import Retention
from tests.support.access import EARLIER_S, LATER_S, a_certificate, a_join_token, a_token, show
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import C, a_cluster, a_spec, execute, submit

DAY_S = 86_400.0


def delete_cluster(store: Store, name: str = C) -> None:
    store.change(deletion.delete_cluster, name, None, store.silence_s, force=True)


def enrol(access: Store, agent: str = "agent-a100-0") -> str:
    """Enrol an agent with a token of its own; return the serial number of its certificate."""
    token = access.change(create_join_token, a_join_token(), "ops").spec
    certificate = a_certificate(agent)
    access.change(enrolment.enrol, show(token), certificate)
    return certificate.serial


def test_a_token_is_stored_with_all_its_fields(access: Store) -> None:
    spec = a_token(
        "ana",
        role=Role.USER,
        clusters=frozenset({"b", "a"}),
        tenants=frozenset({"nlp", ""}),
        expires_s=LATER_S,
    )
    created = access.change(create_token, spec, "root")
    assert (created.spec, created.created_by, created.revoked_s) == (spec, "root", None)
    assert EARLIER_S < created.created_s < LATER_S
    assert access.read(find_token, spec.id) == created
    assert access.read(find_token, "nobody") is None
    forever = access.change(create_token, a_token("bob"), "root")
    assert (forever.spec.expires_s, forever.spec.clusters, forever.spec.tenants) == (
        math.inf,
        None,
        None,
    )
    assert SecretToken("", spec.id, hash_secret("s3cret")).matches(created.spec.secret_hash)


def test_tokens_have_different_names_and_are_listed_by_them_ended_ones_only_on_request(
    access: Store,
) -> None:
    access.change(create_token, a_token("ana"), "root")
    with pytest.raises(AlreadyExists, match="tokens/ana"):
        access.change(create_token, a_token("ana"), "root")
    access.change(revoke_token, "ana")
    for name in ("zoe", "ana", "old", "bob"):
        expires_s = EARLIER_S if name == "old" else math.inf
        access.change(create_token, a_token(name, expires_s=expires_s), "root")
    access.change(revoke_token, "bob")
    assert [t.spec.name for t in access.read(list_tokens, with_ended=False)] == ["ana", "zoe"]
    names = [t.spec.name for t in access.read(list_tokens, with_ended=True)]
    assert names == ["ana", "ana", "bob", "old", "zoe"]


def test_many_callers_at_once_create_one_token_of_a_name(access: Store) -> None:
    outcomes = run_at_once(8, lambda _: access.change(create_token, a_token("ana"), "root"))
    assert outcomes == Counter({"done": 1, "AlreadyExists": 7})


def test_a_token_is_revoked_by_name_or_id_and_once(access: Store) -> None:
    ana = access.change(create_token, a_token("ana"), "root").spec
    bob = access.change(create_token, a_token("bob"), "root").spec
    revoked = access.change(revoke_token, "ana")
    assert revoked.spec == ana
    assert revoked.revoked_s is not None
    assert access.read(find_token, ana.id) == revoked
    assert access.change(revoke_token, bob.id).spec == bob
    for name in ("ana", ana.id, "bob", "nobody"):
        with pytest.raises(NotFound, match=f"tokens/{name}"):
            access.change(revoke_token, name)
    # An id revokes its token, and not one with that name.
    eve = access.change(create_token, a_token("eve"), "root").spec
    access.change(create_token, a_token(eve.id), "root")
    assert access.change(revoke_token, eve.id).spec.name == "eve"


def test_tokens_that_have_not_ended_are_bounded(
    access: Store, lab: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_TOKENS", 2)
    access.change(create_token, a_token("old", expires_s=1.0), "root")
    for name in ("ana", "bob"):
        access.change(create_token, a_token(name), "root")
        access.change(create_join_token, a_join_token(), "root")
    with pytest.raises(LimitReached, match="at most 2 tokens that have not ended"):
        access.change(create_token, a_token("zoe"), "root")
    with pytest.raises(LimitReached, match="at most 2 join tokens"):
        access.change(create_join_token, a_join_token(), "root")


IMPOSSIBLE = [
    ("tokens SET secret_hash = 's3cret'", "ck_tokens_secret_hash"),
    ("tokens SET role = 'agent'", "ck_tokens_role"),
    ("tokens SET tenants = '{nlp}'", "ck_tokens_tenants"),
    ("join_tokens SET used = uses + 1", "ck_join_tokens_uses"),
    ("join_tokens SET uses = 0", "ck_join_tokens_uses"),
    ("join_tokens SET nodes = '{}'", "ck_join_tokens_nodes"),
    ("join_tokens SET secret_hash = 's3cret'", "ck_join_tokens_secret_hash"),
    ("agent_certificates SET serial = '0a'", "ck_agent_certificates_serial"),
    ("agent_certificates SET serial = 'AB'", "ck_agent_certificates_serial"),
    ("agent_certificates SET cluster_id = NULL", "ck_agent_certificates_cluster"),
]


def test_the_database_refuses_impossible_identities(
    access: Store, lab: Store, database: Database
) -> None:
    access.change(create_token, a_token("ana"), "root")
    enrol(access)
    for change, constraint in IMPOSSIBLE:
        with pytest.raises(InvalidInput, match=constraint):
            execute(database, f"UPDATE {change}")


def test_a_join_token_is_stored_and_listed_newest_first(access: Store, lab: Store) -> None:
    first = access.change(create_join_token, a_join_token(uses=2), "ops")
    assert (first.used, first.created_by, first.revoked_s) == (0, "ops", None)
    assert first.spec.nodes == ("a100-*",)
    second = access.change(create_join_token, a_join_token(), "ops")
    expired = access.change(create_join_token, a_join_token(expires_s=EARLIER_S), "ops")
    access.change(enrolment.enrol, show(second.spec), a_certificate())
    revoked = access.change(create_join_token, a_join_token(), "ops")
    gone = access.change(revoke_join_token, C, revoked.spec.id)
    assert gone.revoked_s is not None
    assert access.change(revoke_join_token, C, revoked.spec.id) == gone
    assert access.read(list_join_tokens, C, with_ended=False) == [first]
    ids = [record.spec.id for record in access.read(list_join_tokens, C, with_ended=True)]
    assert ids == [r.spec.id for r in (revoked, expired, second, first)]


def test_calls_on_a_missing_cluster_or_join_token_say_so(access: Store, lab: Store) -> None:
    lab.change(upsert_cluster, "other", lab.read(get_cluster, C).gpu_types, None)
    token = access.change(create_join_token, a_join_token(cluster="other"), "ops").spec
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: access.change(create_join_token, a_join_token(cluster="x"), "ops"), "clusters/x"),
        (lambda: access.read(list_join_tokens, "x", with_ended=True), "clusters/x"),
        (lambda: access.change(revoke_join_token, "x", token.id), "clusters/x"),
        (
            lambda: access.change(revoke_join_token, C, token.id),
            f"clusters/{C}/joinTokens/{token.id}",
        ),
        (lambda: access.read(list_certificates, "x"), "clusters/x"),
        (lambda: access.change(revoke_agent, "x", "a"), "clusters/x"),
        (lambda: access.change(revoke_agent, C, "a"), f"clusters/{C}/agents/a/certificates"),
    ]
    for call, resource in calls:
        with pytest.raises(NotFound, match=f"^{resource} does not exist"):
            call()


def test_an_enrolment_only_for_nodes_that_the_token_allows_is_stored_and_counts_one_use(
    access: Store, lab: Store
) -> None:
    token = access.change(create_join_token, a_join_token(uses=2), "ops").spec
    certificate = a_certificate(nodes=("a100-0", "a100-1"), issued_s=1.5, expires_s=LATER_S)
    access.change(enrolment.enrol, show(token), certificate)
    (stored,) = access.read(list_certificates, C)
    assert stored.join_token == token.id
    assert (stored.serial, stored.agent, stored.nodes, stored.issued_s, stored.expires_s) == (
        certificate.serial,
        certificate.agent,
        certificate.nodes,
        1.5,
        LATER_S,
    )
    assert access.read(list_join_tokens, C, with_ended=True)[0].used == 1
    token = access.change(create_join_token, a_join_token(nodes=("a100-*", "v?00")), "ops").spec
    for nodes in (("a100-0", "A100-1"), ("v100",), ("xa100-0",)):
        with pytest.raises(PermissionDenied, match=rf"does not allow node {nodes[-1]}, only a100-"):
            access.change(enrolment.enrol, show(token), a_certificate(nodes=nodes))
    access.change(enrolment.enrol, show(token), a_certificate(nodes=("a100-", "v?00")))


def test_a_join_token_does_not_make_its_holder_an_agent_with_other_nodes(
    access: Store, lab: Store
) -> None:
    """Whoever speaks as an agent replaces it, and takes its nodes from it."""
    token = access.change(create_join_token, a_join_token(nodes=("v100-0",)), "ops").spec
    with pytest.raises(PermissionDenied, match=r"agent agent-a100-0 has node a100-0, .* v100-0;"):
        access.change(
            enrolment.enrol, show(token), a_certificate("agent-a100-0", nodes=("v100-0",))
        )
    assert access.read(list_certificates, C) == []
    access.change(enrolment.enrol, show(token), a_certificate("agent-new", nodes=("v100-0",)))


def run_at_once(threads: int, work: Callable[[int], object]) -> Counter[str]:
    """Run ``work`` in threads that start together; return how often it ended how."""
    barrier, outcomes = threading.Barrier(threads), []

    def call(number: int) -> None:
        barrier.wait(PATIENCE_S)
        try:
            work(number)
            outcomes.append("done")
        except Exception as error:  # noqa: BLE001 - all outcomes are compared
            outcomes.append(type(error).__name__)

    running = [threading.Thread(target=call, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return Counter(outcomes)


def test_a_join_token_of_ten_uses_enrols_exactly_ten_of_thirty_agents_at_once(
    access: Store, lab: Store, database: Database
) -> None:
    token = access.change(create_join_token, a_join_token(uses=10), "ops").spec
    other = connect_database(database.url, pool_size=20)  # as another replica
    stores = (access, Store(other))
    outcomes = run_at_once(
        30,
        lambda i: stores[i % 2].change(enrolment.enrol, show(token), a_certificate(f"agent-{i}")),
    )
    other.engine.dispose()
    assert outcomes == Counter({"done": 10, "NotAuthenticated": 20})
    assert len(access.read(list_certificates, C)) == 10
    assert access.read(list_join_tokens, C, with_ended=True)[0].used == 10


def test_a_renewal_for_other_nodes_by_another_agent_or_too_often_is_refused(
    access: Store, lab: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = enrol(access)
    with pytest.raises(PermissionDenied, match="does not allow node a100-1"):
        access.change(add_certificate, a_certificate(nodes=("a100-0", "a100-1")), first)
    for certificate, replaces in ((a_certificate("thief"), first), (a_certificate(), "abc")):
        with pytest.raises(NotAuthenticated, match="is not known; enrol again"):
            access.change(add_certificate, certificate, replaces)
    assert len(access.read(list_certificates, C)) == 1
    monkeypatch.setattr(limits, "MAX_CERTIFICATES", 2)
    access.change(add_certificate, a_certificate(), first)
    with pytest.raises(LimitReached, match="already has 2 certificates"):
        access.change(add_certificate, a_certificate(), first)


def test_a_revoked_agent_has_no_valid_certificate_and_can_only_enrol_again(
    access: Store, lab: Store
) -> None:
    first, other = enrol(access), enrol(access, "other")
    renewed = a_certificate()
    access.change(add_certificate, renewed, first)
    both = {first, renewed.serial}
    assert access.change(revoke_agent, C, "agent-a100-0") == sorted(both)
    assert access.read(find_revoked, {*both, other, "abc"}) == both
    assert access.read(find_revoked, []) == set()
    with pytest.raises(NotAuthenticated, match="was revoked; enrol again"):
        access.change(add_certificate, a_certificate(), renewed.serial)
    with pytest.raises(NotFound, match="agents/agent-a100-0/certificates"):
        access.change(revoke_agent, C, "agent-a100-0")
    again = enrol(access)
    assert access.read(find_revoked, [again]) == set()
    shown = {c.serial: c.revoked_s is None for c in access.read(list_certificates, C)}
    assert shown == {first: False, renewed.serial: False, other: True, again: True}


def test_an_agent_with_expired_certificates_only_has_nothing_to_revoke(
    access: Store, lab: Store, database: Database
) -> None:
    enrol(access)
    execute(database, "UPDATE agent_certificates SET expires_at = now() - interval '1 s'")
    assert access.read(list_certificates, C) == []
    with pytest.raises(NotFound):
        access.change(revoke_agent, C, "agent-a100-0")


def test_a_renewal_under_way_does_not_escape_the_revocation_of_its_agent(
    access: Store, lab: Store, database: Database
) -> None:
    first = enrol(access)
    other = connect_database(database.url)
    renewed, revoked = a_certificate(), []
    thread = threading.Thread(
        target=lambda: revoked.extend(Store(other).change(revoke_agent, C, "agent-a100-0"))
    )
    waits = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")

    def renew_slowly(connection: sa.Connection) -> None:
        enrolment.add_certificate(connection, renewed, first)
        thread.start()
        with database.engine.connect() as plain:
            watching = plain.execution_options(isolation_level="AUTOCOMMIT")
            while not watching.execute(waits).scalar_one():
                assert thread.is_alive()

    database.write(renew_slowly)
    thread.join(PATIENCE_S)
    other.engine.dispose()
    assert sorted(revoked) == sorted([first, renewed.serial])
    assert access.read(find_revoked, [renewed.serial]) == {renewed.serial}


def test_revocations_are_notified_with_their_keys(
    access: Store, lab: Store, database: Database
) -> None:
    token = access.change(create_token, a_token("ana"), "root").spec
    first, second = enrol(access), enrol(access, "other")
    notices: list[str] = []
    changed = threading.Condition()

    def take(key: str) -> None:
        with changed:
            notices.append(key)
            changed.notify_all()

    def wait_for(*keys: str) -> None:
        with changed:
            assert changed.wait_for(lambda: {*keys} <= {*notices}, PATIENCE_S)

    listener = Listener(database.url)
    listener.subscribe(take, ACCESS_CHANNEL)
    with listener:
        wait_for(EVERY_CLUSTER)
        access.change(revoke_token, "ana")
        wait_for(f"token/{token.id}")
        access.change(revoke_agent, C, "agent-a100-0")
        wait_for(f"certificate/{first}")
        with pytest.raises(NotFound):
            access.change(revoke_agent, C, "agent-a100-0")
        delete_cluster(lab)
        wait_for(f"certificate/{second}")


def test_certificates_of_a_deleted_cluster_are_revoked_for_a_new_one_of_its_name(
    access: Store, lab: Store
) -> None:
    serial = enrol(access)
    token = access.change(create_join_token, a_join_token(), "ops").spec
    delete_cluster(lab)
    assert access.read(find_revoked, [serial]) == {serial}
    with pytest.raises(NotAuthenticated, match=f"is not for cluster {C}"):
        access.change(enrolment.enrol, show(token), a_certificate())
    with pytest.raises(NotAuthenticated, match="does not exist, so its certificates are revoked"):
        access.change(add_certificate, a_certificate(), serial)
    a_cluster(lab)
    with pytest.raises(NotAuthenticated, match=f"is not for cluster {C}"):
        access.change(enrolment.enrol, show(token), a_certificate())
    with pytest.raises(NotAuthenticated, match="was revoked"):
        access.change(add_certificate, a_certificate(), serial)
    while lab.update(purge_batch):
        pass
    assert access.read(find_revoked, [serial]) == {serial}
    assert access.read(list_certificates, C) == []
    assert access.read(list_join_tokens, C, with_ended=True) == []
    with pytest.raises(NotAuthenticated, match="does not exist or its secret is wrong"):
        access.change(enrolment.enrol, show(token), a_certificate())


def test_ended_tokens_and_expired_certificates_are_pruned(
    access: Store, lab: Store, database: Database
) -> None:
    for name in ("revoked", "expired", "stays"):
        access.change(create_token, a_token(name, expires_s=LATER_S), "root")
    access.change(revoke_token, "revoked")
    ended, kept = enrol(access), enrol(access, "other")
    access.change(revoke_agent, C, "other")
    for change in (
        "tokens SET revoked_at = now() - interval '31 days' WHERE name = 'revoked'",
        "tokens SET expires_at = now() - interval '31 days' WHERE name = 'expired'",
        "join_tokens SET expires_at = now() - interval '31 days'",
        f"agent_certificates SET expires_at = now() - interval '25 h' WHERE serial = '{ended}'",
        f"agent_certificates SET expires_at = now() - interval '23 h' WHERE serial = '{kept}'",
    ):
        execute(database, f"UPDATE {change}")
    deleted = lab.prune_batch(C, Retention(jobs_s=32 * DAY_S))
    assert {kind: n for kind, n in deleted.items() if n} == {"agent_certificates": 1}
    assert access.read(find_revoked, [kept]) == {kept}  # of servers whose clocks are late
    deleted = lab.prune_batch(C, Retention(jobs_s=30 * DAY_S))
    assert {kind: n for kind, n in deleted.items() if n} == {"tokens": 2, "join_tokens": 2}
    assert [t.spec.name for t in access.read(list_tokens, with_ended=True)] == ["stays"]


def test_the_tenants_of_jobs_are_those_of_the_cluster_s_jobs(lab: Store) -> None:
    submit(lab, a_spec("a", tenant="nlp"), a_spec("b"))
    assert lab.read(tenants_of_jobs, C, ["a", "b", "x", "a\0"]) == {"a": "nlp", "b": ""}
    assert lab.read(tenants_of_jobs, "x", ["a"]) == {}
    assert lab.read(tenants_of_jobs, "x\0", ["a"]) == {}
    assert lab.read(tenants_of_jobs, C, []) == {}
