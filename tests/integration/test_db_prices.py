"""Shadow prices of the last round, as the next round reads them."""

from __future__ import annotations

from tessera.db.store import PostgresStore
from tessera.formulation.last_round import NO_PRICES
from tessera.formulation.snapshot import Snapshot
from tests.support.stored_cluster import C, a_cluster, a_round, a_spec, a_summary, submit, wait


def commit_with_prices(
    store: PostgresStore, prices: dict[str, float], outcome: str = ""
) -> Snapshot:
    """Commit a round with these prices, and return the next round's snapshot."""
    snapshot = store.snapshot(C)
    summary = a_summary(snapshot, prices=prices, outcome=outcome)
    store.commit(a_round(snapshot, wait(snapshot, "a"), summary=summary, legs=snapshot.legs))
    return store.snapshot(C)


def test_a_cluster_has_no_prices_before_its_first_round(store: PostgresStore) -> None:
    a_cluster(store)
    assert store.snapshot(C).prices.equals(NO_PRICES)


def test_the_next_round_reads_the_last_decided_rounds_prices_to_the_bit(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    third = 1.0 / 3.0
    following = commit_with_prices(
        store, {"gpus/v100": 1e-17, "gpus/a100": third, "changes": 0.0, "Z": 2e300}
    )
    assert following.prices.name == ("Z", "changes", "gpus/a100", "gpus/v100")
    assert following.prices.price.tolist() == [2e300, 0.0, third, 1e-17]
    refused = commit_with_prices(store, {"gpus/a100": 9.0}, outcome="refused")
    assert refused.prices.equals(following.prices)
    later = commit_with_prices(store, {"gpus/a100": 0.5})
    assert (later.prices.name, later.prices.price.tolist()) == (("gpus/a100",), [0.5])
    assert commit_with_prices(store, {}).prices.equals(NO_PRICES)


def test_invalid_prices_never_stop_a_cluster(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    following = commit_with_prices(
        store, {"a": -1e-12, "b": float("inf"), "c": float("nan"), "d": 1.0}
    )
    assert (following.prices.name, following.prices.price.tolist()) == (("a", "d"), [0.0, 1.0])


def test_a_stored_round_keeps_the_prices_that_it_began_with(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    commit_with_prices(store, {"gpus/a100": 0.25})
    commit_with_prices(store, {"gpus/a100": 0.75})
    assert store.round_snapshot(C, 1).prices.equals(NO_PRICES)
    assert store.round_snapshot(C, 2).prices.price.tolist() == [0.25]
