"""Cells that the service derives: for known models, new ones, and workloads that it cannot estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tessera.db.clusters.deletion import delete_cells
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster, upsert_nodes
from tessera.db.store.reads import list_estimates
from tessera.db.store.store import Store
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.values import EstimateSource, GpuType, Workload
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import CellFilter, EstimateRecord
from tessera.service.server.estimates.deriver import CellDeriver
from tessera.solvers.rounds.options import RoundOptions
from tests.support.decided_rounds import decide
from tests.support.logged import logged_lines
from tests.support.notices import round_requests
from tests.support.stored_cluster import (
    BERT,
    C,
    a_bare_cluster,
    a_record,
    a_spec,
    agents_report,
    apply_event,
    cells_of,
    job,
    run,
    submit,
)
from tests.support.training import TRAINER

PUBLISHED = Workload(model="bert", params="1.3B", global_batch=256)

MOE = Workload(model="moe", params="690M", global_batch=256)


def a_deriving(store: Store, *multiples: float, learns: bool = True) -> CellDeriver:
    return CellDeriver(store, catalogue_of(), multiples or (0.5, 1.0, 2.0), learns=learns)


def types_and_counts(records: Sequence[EstimateRecord]) -> set[tuple[str, int]]:
    return {(r.cell.gpu_type, r.cell.gpus) for r in records}


def reason_text(store: Store, name: str) -> str:
    reason = job(store, name).reason
    return "" if reason is None else f"{reason.code}: {reason.message}; {reason.next_step}"


def test_a_job_without_estimates_gets_cells_on_all_types_once(store: Store) -> None:
    a_bare_cluster(store, "a100", "v100")
    submit(store, a_spec("j", workload=PUBLISHED, requested_gpus=4))
    assert a_deriving(store).derive(C) == 1
    records = cells_of(store, PUBLISHED)
    assert types_and_counts(records) == {(t, n) for t in ("a100", "v100") for n in (2, 4, 8)}
    assert {r.source for r in records} == {EstimateSource.ANALYTIC}
    assert reason_text(store, "j") == ""
    assert a_deriving(store).derive(C) == 0
    assert cells_of(store, PUBLISHED) == records


def test_counts_can_be_widened_but_never_exceed_the_gpus_of_a_type(store: Store) -> None:
    a_bare_cluster(store)
    submit(store, a_spec("j", workload=PUBLISHED, requested_gpus=2))
    a_deriving(store, 0.25, 0.5, 1, 2, 4, 8).derive(C)
    assert types_and_counts(cells_of(store, PUBLISHED)) == {("a100", n) for n in (1, 2, 4, 8)}


def test_another_request_adds_counts_and_none_is_removed_with_the_last_one(
    store: Store,
) -> None:
    a_bare_cluster(store)
    submit(store, a_spec("small", workload=PUBLISHED, requested_gpus=1))
    deriving = a_deriving(store)
    deriving.derive(C)
    assert types_and_counts(cells_of(store, PUBLISHED)) == {("a100", 1), ("a100", 2)}
    submit(store, a_spec("large", workload=PUBLISHED, requested_gpus=8))
    assert deriving.derive(C) == 1
    assert types_and_counts(cells_of(store, PUBLISHED)) == {("a100", n) for n in (1, 2, 4, 8)}
    apply_event(store, "small", JobEvent.CANCEL)
    assert deriving.derive(C) == 0
    store.change(upsert_nodes, C, [NodeSpec(name="n", gpu_type="a100", gpus=8)])
    before = {(r.cell.gpus, r.cell.pipeline_degree): r for r in cells_of(store, PUBLISHED)}
    assert deriving.derive(C) == 1
    after = {(r.cell.gpus, r.cell.pipeline_degree): r for r in cells_of(store, PUBLISHED)}
    assert {gpus for gpus, _ in after} == {1, 2, 4, 8, 16}
    assert after.keys() > before.keys()


def test_requests_that_fit_no_type_are_reported(store: Store) -> None:
    a_bare_cluster(store, nodes=1)
    submit(store, a_spec("j", workload=PUBLISHED, requested_gpus=4))
    a_deriving(store, 2.0).derive(C)
    assert "to estimate are 8, but the cluster has only 4 x a100" in reason_text(store, "j")


def test_a_cluster_without_nodes_gets_no_cells_until_nodes_are_added(store: Store) -> None:
    a_bare_cluster(store, nodes=0)
    submit(store, a_spec("j", workload=PUBLISHED))
    deriving = a_deriving(store)
    assert deriving.derive(C) == 0
    assert "has no nodes yet" in reason_text(store, "j")
    store.hello(C, "agent-n", "first", [NodeSpec(name="n", gpu_type="a100", gpus=4)])
    assert deriving.derive(C) == 1
    assert reason_text(store, "j") == ""


def test_a_job_says_that_its_cells_are_being_made(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_bare_cluster(store)
    submit(store, a_spec("j", workload=PUBLISHED))
    reasons: list[str] = []
    real = Estimator.cells

    def cells(self: Estimator, *args: Any, **options: Any) -> Any:
        reasons.append(reason_text(store, "j"))
        return real(self, *args, **options)

    monkeypatch.setattr(Estimator, "cells", cells)
    a_deriving(store).derive(C)
    assert "they are being computed for a100" in reasons[0]


def test_a_workload_that_cannot_be_estimated_does_not_delay_others(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a_bare_cluster(store)
    submit(store, a_spec("bad", workload=MOE), a_spec("good", workload=PUBLISHED))
    real = Estimator.cells

    def cells(self: Estimator, workload: Workload, *args: Any, **options: Any) -> Any:
        if workload == MOE:
            raise TesseraError("its experts are on strike")
        return real(self, workload, *args, **options)

    monkeypatch.setattr(Estimator, "cells", cells)
    a_deriving(store).derive(C)
    assert "could not be computed: its experts are on strike" in reason_text(store, "bad")
    assert cells_of(store, PUBLISHED)
    (line,) = logged_lines(caplog, "cells_failed")
    assert "workload=moe/690M/256" in line


def test_cells_of_a_cancelled_pass_are_not_written(store: Store) -> None:
    a_bare_cluster(store)
    submit(store, a_spec("j", workload=PUBLISHED))
    assert a_deriving(store).derive(C, lambda: True) == 0
    assert cells_of(store, PUBLISHED) == []


def measure_job(store: Store, name: str, gpus: int, iter_time_s: float) -> None:
    """Let a job run on a Cell of degree 1 long enough to be measured."""
    run(store, **{name: [("a100-0", list(range(gpus)))]})
    for done in range(1, 8):
        agents_report(store, iterations_done=float(done), iter_time_s=iter_time_s, runtime=TRAINER)


def computed_cells(store: Store, workload: Workload) -> dict[tuple[int, int], EstimateRecord]:
    """Return the computed estimates on one node, by GPUs and pipeline degree."""
    return {
        (r.cell.gpus, r.cell.pipeline_degree): r
        for r in cells_of(store, workload)
        if r.source is EstimateSource.ANALYTIC and r.cell.nodes == 1
    }


@pytest.mark.usefixtures("trainer")
def test_a_measurement_replaces_a_cell_and_corrects_similar_ones(store: Store) -> None:
    a_bare_cluster(store)
    submit(store, a_spec("runs", workload=PUBLISHED, requested_gpus=2))
    submit(store, a_spec("waits", workload=MOE, requested_gpus=2))
    deriving = a_deriving(store)
    assert deriving.derive(C) == 2
    before, others = computed_cells(store, PUBLISHED), computed_cells(store, MOE)
    slow = 1.5 * before[2, 1].iter_time_s
    measure_job(store, "runs", 2, slow)
    assert deriving.derive(C) == 2
    (own,) = (r for r in cells_of(store, PUBLISHED) if r.source is EstimateSource.MEASURED)
    assert (own.cell.gpus, own.cell.pipeline_degree, own.iter_time_s) == (2, 1, slow)
    assert own.provenance == "median of 1 run here"
    assert own.plan == before[2, 1].plan
    like, now = computed_cells(store, PUBLISHED)[2, 2], computed_cells(store, MOE)
    assert like.iter_time_s > 1.2 * before[2, 2].iter_time_s
    assert like.sd is not None
    assert before[2, 2].sd is not None
    assert like.sd < before[2, 2].sd
    assert "calibrated on 1 measurements" in like.provenance
    # The type is slower than its data sheet.
    assert now[2, 1].iter_time_s > others[2, 1].iter_time_s
    assert deriving.derive(C) == 0


@pytest.mark.usefixtures("trainer")
def test_a_measurement_on_a_shape_without_an_estimate_adds_one(store: Store) -> None:
    a_bare_cluster(store)
    store.change(upsert_estimates, C, [a_record(2, nodes=1, iter_time_s=1.0)])
    submit(store, a_spec("runs", requested_gpus=2))
    run(store, runs=[("a100-0", [0]), ("a100-1", [0])])
    for done in range(1, 8):
        agents_report(store, iterations_done=float(done), iter_time_s=3.0, runtime=TRAINER)
    a_deriving(store).derive(C)
    assert [(r.cell.nodes, r.iter_time_s) for r in cells_of(store, BERT)] == [(1, 1.0), (2, 3.0)]


OLD = [Workload(model="bert", params="760M", global_batch=n) for n in (64, 128, 256)]


NEW = Workload(model="moe", params="690M", global_batch=256)


def test_new_workloads_are_estimated_between_lease_renewals(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.change(upsert_cluster, C, [GpuType(name="a100", memory_bytes=2**35)], None)
    store.change(upsert_nodes, C, [NodeSpec(name="n", gpu_type="a100", gpus=1)])
    submit(store, *(a_spec(f"old-{i}", workload=w) for i, w in enumerate(OLD)))
    deriving = CellDeriver(store, catalogue_of(), (1.0, 2.0))
    assert deriving.derive(C) == 3
    store.change(upsert_nodes, C, [NodeSpec(name="m", gpu_type="a100", gpus=2)])
    estimated: list[Workload] = []
    wake_ups: list[str] = []
    real = Estimator.cells

    def cells(self: Estimator, workload: Workload, *args: Any, **options: Any) -> Any:
        estimated.append(workload)
        if not wake_ups:
            submit(store, a_spec("new", workload=NEW))
            wake_ups.append("woken")
        return real(self, workload, *args, **options)

    monkeypatch.setattr(Estimator, "cells", cells)

    def woken() -> bool:
        if wake_ups != ["woken"]:
            return False
        wake_ups.append("taken")
        return True

    assert deriving.derive(C, woken=woken) == 4
    assert list(dict.fromkeys(estimated)) == [OLD[0], NEW, OLD[1], OLD[2]]


def test_a_type_that_is_dropped_and_added_back_is_estimated_again(store: Store) -> None:
    types = [GpuType(name=t, memory_bytes=2**35) for t in ("a100", "v100")]
    nodes = [NodeSpec(name=t.name, gpu_type=t.name, gpus=1) for t in types]
    store.change(upsert_cluster, C, types, None)
    store.change(upsert_nodes, C, nodes)
    submit(store, a_spec("j", workload=OLD[0]))
    deriving = CellDeriver(store, catalogue_of(), (1.0,))
    deriving.derive(C)
    store.change(upsert_nodes, C, [replace(n, gpu_type="a100") for n in nodes])
    store.change(upsert_cluster, C, types[:1], None)
    store.change(upsert_cluster, C, types, None)
    store.change(upsert_nodes, C, nodes)
    assert deriving.derive(C) == 1
    estimates, _ = store.read(list_estimates, C, OLD[0], 0, 10)
    assert {e.cell.gpu_type for e in estimates} == {"a100", "v100"}


SPHINX = Workload(model="sphinx", params="9B", global_batch=8)
LARGE_BERT = Workload(model="bert", params="1.3B", global_batch=256)


def a_sphinx(name: str = "s", **more: Any) -> Any:
    stated = {"workload": SPHINX, "requested_gpus": 4, "requested_gpu_type": "a100"}
    return a_spec(name, **stated | more)


def a_deriver(store: Store, *, derives: bool = True) -> CellDeriver:
    return CellDeriver(store, catalogue_of(), (1.0,), derives=derives)


def reports(store: Store, runtime: str) -> None:
    for done in range(1, 8):
        agents_report(store, iterations_done=float(done), iter_time_s=2.0, runtime=runtime)


def unestimated(store: Store) -> dict[str, bool]:
    jobs = store.snapshot(C).jobs
    return dict(zip(jobs.name, jobs.unestimated.tolist(), strict=True))


def test_a_job_waits_until_the_server_has_found_that_nobody_knows_its_model(
    store: Store, database: Database
) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx(), a_spec("known", workload=LARGE_BERT, requested_gpu_type="a100"))
    assert unestimated(store) == {"s": False, "known": False}
    first = decide(store)
    assert first["s"].reason is not None
    assert first["s"].reason.code is ReasonCode.ESTIMATING
    with round_requests(database) as requests:
        a_deriver(store).derive(C)
        assert C in requests.take()
        a_deriver(store).derive(C)
        assert requests.take() == []
    assert unestimated(store) == {"s": True, "known": False}
    since = job(store, "s").reason
    assert since is not None
    assert "it will run on the GPUs that it requests, at an unknown rate" in str(since.message)
    assert decide(store)["s"].kind is DecisionKind.START


@pytest.mark.usefixtures("trainer")
@pytest.mark.parametrize("derives", [True, False])
def test_once_measured_it_is_a_job_like_any_other(store: Store, derives: bool) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx())
    deriver = a_deriver(store, derives=derives)
    deriver.derive(C)
    decide(store)
    agents_report(store)
    reports(store, TRAINER)
    deriver.derive(C)
    assert unestimated(store) == {"s": False}
    mine = decide(store)["s"]
    assert (mine.kind, mine.rate) == (DecisionKind.KEEP, 8 / 2.0)
    store.change(upsert_estimates, C, [a_record(8, workload=SPHINX, iter_time_s=0.1)])
    mine = decide(store, RoundOptions(change_spacing=0.0))["s"]
    assert (mine.kind, mine.cell.gpus) == (DecisionKind.RESIZE, 8)


def test_a_job_is_found_unknown_again_after_a_user_deleted_its_estimates(
    store: Store,
) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx())
    deriver = a_deriver(store)
    deriver.derive(C)
    store.change(upsert_estimates, C, [a_record(4, workload=SPHINX)])
    assert unestimated(store) == {"s": False}
    store.change(delete_cells, C, CellFilter(workload=SPHINX))
    deriver.derive(C)
    assert unestimated(store) == {"s": True}
