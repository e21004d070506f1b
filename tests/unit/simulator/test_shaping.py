"""Shaping and screening of traces: the effect of each step, and why jobs are dropped."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.traces import screening
from tessera.simulator.traces.recipe import Recipe, apply_recipe
from tessera.simulator.traces.redraw import (
    count_sizes,
    job_requests,
    parameter_count,
    redraw_models,
    with_large_share,
)
from tessera.simulator.traces.screening import (
    screen_durations,
    screen_form,
    screen_jobs,
    screen_profiled,
)
from tessera.simulator.traces.shaping import (
    faster_arrivals,
    longer_lives,
    looser_deadlines,
    on_type,
    sample_jobs,
    sampled_to_load,
    split_tenants,
    with_deadlines,
    without_deadlines,
)
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, gpu_seconds, requested_load
from tessera.simulator.traces.trace import PLAN_LABEL, Arrival
from tests.support.traces import (
    a_cluster,
    a_record,
    a_type,
    a_workload,
    an_arrival,
    an_asked,
    deadlines,
    some_arrivals,
)

SMALL, LARGE = a_workload("bert", "1.3B"), a_workload("bert", "6.7B")


def two_models() -> Speeds:
    """Return speeds of a small model on 1 to 4 GPUs and a large one on 4 and 8, on a cluster of 8."""
    return Speeds(
        [a_record(n, iter_time_s=4.0 / n, work=SMALL, nodes=1) for n in (1, 2, 4)]
        + [a_record(n, iter_time_s=8.0 / n, work=LARGE, nodes=n // 4) for n in (4, 8)]
        + [a_record(16, iter_time_s=0.1, work=LARGE, nodes=4)],
        ClusterRoom.of(a_cluster(nodes=2, gpus=4)),
    )


def test_a_sample_keeps_its_share_the_order_and_each_job_unchanged() -> None:
    jobs = some_arrivals(100)
    sample = sample_jobs(jobs, 0.25, seed=3)
    assert len(sample) == 25
    assert sample == sorted(sample, key=lambda a: a.arrival_s)
    assert all(a in jobs for a in sample)
    assert sample_jobs(jobs, 0.25, seed=3) == sample != sample_jobs(jobs, 0.25, seed=4)
    with pytest.raises(InvalidInput, match="cannot be up-sampled"):
        sample_jobs(jobs, 1.5, seed=3)


def test_a_sample_reaches_the_given_load_and_an_unreachable_load_is_refused() -> None:
    # each minute brings 20 GPU-minutes: 20 GPUs
    jobs = some_arrivals(400, gap_s=60.0, iterations=1200)
    speeds = Speeds([a_record(1)], ClusterRoom.of(a_cluster()))
    assert requested_load(jobs, speeds, 8) == pytest.approx(2.5, rel=0.01)
    assert requested_load(
        sampled_to_load(jobs, speeds, 8, 0.7, seed=1), speeds, 8
    ) == pytest.approx(0.7, abs=0.02)
    with pytest.raises(InvalidInput, match=r"2\.51 with all jobs"):
        sampled_to_load(jobs, speeds, 8, 3.0, seed=1)


@pytest.mark.parametrize(("wanted", "jobs"), [(0.32, 3), (0.38, 4), (0.05, 1), (1.0, 10)])
def test_the_number_of_jobs_with_the_nearest_load_is_chosen(wanted: float, jobs: int) -> None:
    # each job is a load of 0.1
    each = [an_arrival(f"j{i}", 1000.0, iterations=100) for i in range(10)]
    assert len(sampled_to_load(each, Speeds([a_record(1)]), 1, wanted, seed=1)) == jobs


def test_arrivals_twice_as_fast_double_the_load_and_so_do_jobs_twice_as_long() -> None:
    jobs = some_arrivals(50, iterations=700, deadline_s=1000.0)
    speeds = Speeds([a_record(1)])
    before = requested_load(jobs, speeds, 8)
    assert requested_load(faster_arrivals(jobs, 2.0), speeds, 8) == pytest.approx(2 * before)
    longer = longer_lives(jobs, 2.0)
    assert requested_load(longer, speeds, 8) == pytest.approx(2 * before)
    assert deadlines(longer) == [2000.0] * 50  # equally tight
    assert longer_lives(jobs, 1e-6)[0].spec.iterations == 1


def test_the_load_is_the_arriving_work_over_the_capacity_until_the_last_arrival() -> None:
    jobs = [an_arrival("a", 0.0, 100, gpus=2), an_arrival("b", 1000.0, 300)]
    speeds = Speeds([a_record(1, iter_time_s=2.0), a_record(2)])
    assert gpu_seconds(jobs, speeds).tolist() == [200.0, 600.0]
    assert requested_load(jobs, speeds, 4) == pytest.approx(800 / 4000)
    assert requested_load(jobs[:1], speeds, 4) == math.inf


def test_a_job_of_any_type_is_assumed_to_run_on_the_fastest_one() -> None:
    speeds = Speeds([a_record(1, "a100", 2.0), a_record(1, "v100", 3.0), a_record(2, "v100", 1.0)])
    assert speeds.iter_time_s(an_arrival(gpu_type="").spec) == 2.0
    assert speeds.iter_time_s(an_arrival(gpu_type="", gpus=4).spec) == math.inf


def test_deadlines_are_the_requested_duration_times_a_tightness() -> None:
    speeds = Speeds([a_record(1, iter_time_s=3.0)])
    jobs = some_arrivals(200, iterations=100)
    assert deadlines(with_deadlines(jobs, speeds, (1.5, 1.5), seed=1)) == [450.0] * 200
    drawn = deadlines(with_deadlines(jobs, speeds, (0.5, 1.5), seed=1))
    assert 150 <= min(drawn) < 170
    assert 430 < max(drawn) <= 450
    assert deadlines(looser_deadlines(with_deadlines(jobs, speeds, (1, 1), 1), 5))[0] == 1500.0
    assert deadlines(without_deadlines(with_deadlines(jobs, speeds, (1, 1), 1))) == []
    with pytest.raises(InvalidInput, match="200 jobs that do not run as requested"):
        with_deadlines(on_type(jobs, "v100"), speeds, (1, 1), 1)


def test_tenants_get_the_given_numbers_of_jobs_and_only_one_is_guaranteed_with_a_quota() -> None:
    found, tenants = split_tenants(some_arrivals(406), 194, 64, seed=0)
    guaranteed = [a for a in found if a.spec.guaranteed]
    assert len(guaranteed) == 194
    assert {a.spec.tenant for a in guaranteed} == {tenants[0].name}
    assert {a.spec.tenant for a in found if not a.spec.guaranteed} == {tenants[1].name}
    assert [t.quotas for t in tenants] == [{"": 64}, {}]
    # drawn at random, not the first ones
    assert {a.spec.guaranteed for a in found[:30]} == {True, False}
    with pytest.raises(InvalidInput, match="0 to 406"):
        split_tenants(some_arrivals(406), 407, 64, seed=0)


def test_a_redrawn_job_runs_as_requested_on_the_cluster_at_equal_gpu_hours() -> None:
    speeds = two_models()
    jobs = [
        an_asked(f"j{i}", i * 60.0, 5000.0, gpus) for i, gpus in enumerate([1, 2, 4, 8, 16] * 20)
    ]
    redrawn_jobs = redraw_models(jobs, speeds, seed=1)
    assert {w.params for w in (a.spec.workload for a in redrawn_jobs)} == {"1.3B", "6.7B"}
    for before, after in zip(jobs, redrawn_jobs, strict=True):
        assert after.arrival_s == before.arrival_s
        assert speeds.iter_time_s(after.spec) < math.inf
        assert after.spec.requested_gpus <= 8  # 16 do not fit
        wanted = before.duration_s * before.spec.requested_gpus
        assert gpu_seconds([after], speeds)[0] == pytest.approx(wanted, abs=4.0)
    small = [a for a in redrawn_jobs if a.spec.workload == SMALL]
    assert {a.spec.requested_gpus for a in small} == {1, 2, 4}  # 8 and 16 become the nearest, 4


def test_a_job_keeps_its_gpus_and_its_type_if_any_model_runs_on_them() -> None:
    speeds = Speeds([a_record(2), a_record(4), a_record(4, "v100"), a_record(8, nodes=2)], None)
    stated = [an_asked(str(gpus), gpus=gpus) for gpus in (1, 2, 4, 8)]
    typed = [job._replace(spec=replace(job.spec, requested_gpu_type="v100")) for job in stated]
    for seed in range(5):
        kept = redraw_models(stated, speeds, seed, keep_requests=True)
        assert [a.spec.requested_gpus for a in kept] == [2, 2, 4, 8]
        kept = redraw_models(typed, speeds, seed, keep_requests=True)
        assert [a.spec.requested_gpus for a in kept] == [2, 2, 4, 8]
        assert kept[2].spec.requested_gpu_type == "v100"


def test_a_redrawn_deadline_is_as_tight_and_the_old_models_plan_is_removed() -> None:
    speeds = Speeds([a_record(4)])
    job = an_asked("a", gpus=1, duration_s=400.0)
    spec = an_arrival("a", gpus=1, deadline_s=800.0, labels={PLAN_LABEL: "248", "team": "nlp"}).spec
    (found,) = redraw_models([job._replace(spec=spec)], speeds, 1)
    assert (found.spec.iterations, found.spec.deadline_s) == (100, 200.0)
    assert found.spec.labels == {"team": "nlp"}


def test_redrawing_refuses_missing_candidates_and_jobs_without_duration() -> None:
    with pytest.raises(InvalidInput, match="no model that may be drawn"):
        redraw_models([an_asked()], Speeds([a_record(1, iter_time_s=math.inf)]), 1)
    with pytest.raises(InvalidInput, match="durations above 0; j do not"):
        redraw_models([an_asked(duration_s=0.0)], Speeds([a_record(1)]), 1)
    with pytest.raises(InvalidInput, match="do not run as requested"):
        job_requests([an_arrival(gpus=3)], Speeds([a_record(1)]))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_large_models_is_reached_by_redrawing_as_few_jobs_as_possible(
    share: float,
) -> None:
    speeds = two_models()
    jobs = some_arrivals(40, work=SMALL, gpus=4) + [
        an_arrival(f"l{i}", 1e4, work=LARGE, gpus=4) for i in range(10)
    ]
    found = with_large_share(jobs, speeds, share, seed=2)
    assert count_sizes(found)["bert", "6.7B"] == round(share * 50)
    assert sum(a != b for a, b in zip(jobs, found, strict=True)) == abs(round(share * 50) - 10)
    assert gpu_seconds(found, speeds).sum() == pytest.approx(gpu_seconds(jobs, speeds).sum(), 0.02)


def test_model_sizes_are_parsed_as_parameter_counts() -> None:
    assert [parameter_count(p) for p in ("690M", "1.3B", "27B")] == [690e6, 1.3e9, 27e9]
    with pytest.raises(InvalidInput, match="not a size"):
        parameter_count("large")


def test_an_empty_recipe_leaves_a_trace_unchanged() -> None:
    jobs = some_arrivals(10)
    assert Recipe(seed=7, quota_gpus=3).is_empty
    assert not Recipe(share=1.0).is_empty
    assert apply_recipe(Recipe(), jobs, None) == (jobs, [])
    assert apply_recipe(Recipe(share=0.5), jobs, None)[0] != jobs


def test_a_recipe_names_its_missing_input() -> None:
    jobs = some_arrivals(10)
    with pytest.raises(InvalidInput, match="profiles"):
        apply_recipe(Recipe(load=0.5), jobs, None)
    with pytest.raises(InvalidInput, match="nodes"):
        apply_recipe(Recipe(load=0.5), jobs, Speeds([a_record(1)]))
    with pytest.raises(InvalidInput, match="redraw"):
        apply_recipe(Recipe(), [an_asked()], None)
    with pytest.raises(InvalidInput, match="quota"):
        apply_recipe(Recipe(guaranteed_share=0.5), jobs, None)


def test_an_additional_step_does_not_change_the_draws_of_others() -> None:
    speeds = two_models()
    jobs = some_arrivals(60, work=SMALL, gpus=4)
    plain, _ = apply_recipe(Recipe(guaranteed_share=0.5, seed=5), jobs, speeds)
    both, _ = apply_recipe(Recipe(guaranteed_share=0.5, tightness=(1, 2), seed=5), jobs, speeds)
    assert [a.spec.guaranteed for a in plain] == [a.spec.guaranteed for a in both]
    other, _ = apply_recipe(Recipe(guaranteed_share=0.5, seed=6), jobs, speeds)
    assert [a.spec.guaranteed for a in plain] != [a.spec.guaranteed for a in other]


OTHER, GIANT = a_workload("moe", "2.4B"), a_workload("moe", "27B")

PROFILES = [
    a_record(1),
    a_record(2),
    a_record(4, iter_time_s=math.inf),
    a_record(8, nodes=2),
    a_record(16, nodes=4),
    a_record(16, nodes=4, work=GIANT),
]

NODES = a_cluster(nodes=2, gpus=4)


def dropped_reasons(*arrivals: Arrival) -> list[str]:
    screened_jobs = screen_jobs(arrivals, PROFILES, [a_type()], NODES, "drop")
    return [one.reason for one in screened_jobs.dropped]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (an_arrival("b", iterations=0), screening.EMPTY),
        (an_arrival("b", at_s=-1.0), screening.EARLY),
        (an_arrival("b", at_s=math.nan), screening.EARLY),
        (an_arrival("b", work=OTHER), screening.UNKNOWN_MODEL),
        (an_arrival("b", work=a_workload(batch=512)), screening.UNKNOWN_MODEL),
        (an_arrival("b", gpu_type="h100"), screening.ABSENT_TYPE),
        (an_arrival("b", gpus=16), screening.TOO_LARGE),
        (an_arrival("b", gpus=16, gpu_type=""), screening.TOO_LARGE),
        (an_arrival("b", gpus=3), screening.NOT_PROFILED),
        (an_arrival("b", gpus=4), screening.INFEASIBLE),
        (an_arrival("b", gpus=4, gpu_type=""), screening.INFEASIBLE),
        (an_arrival("b", gpus=8, work=GIANT), screening.NEVER_RUNS),
    ],
)
def test_each_kind_of_bad_job_has_its_own_reason(bad: Arrival, reason: str) -> None:
    assert dropped_reasons(an_arrival("a", gpus=8), bad, an_arrival("c", gpu_type="")) == [reason]


def test_the_first_good_job_of_a_repeated_name_is_kept() -> None:
    jobs = [an_arrival("a", iterations=0), an_arrival("a", 5.0), an_arrival("a", 6.0)]
    screened_jobs = screen_jobs(jobs, PROFILES, [a_type()], NODES, "drop")
    assert screened_jobs.arrivals == [jobs[1]]
    assert [one.reason for one in screened_jobs.dropped] == [screening.EMPTY, screening.REPEATED]


def test_bad_jobs_are_refused_with_the_count_and_the_first_names_of_each_reason() -> None:
    jobs = [an_arrival(f"big{i}", gpus=16) for i in range(7)] + [an_arrival("x", work=OTHER)]
    with pytest.raises(InvalidInput) as caught:
        screen_jobs(jobs, PROFILES, [a_type()], NODES)
    text = str(caught.value)
    assert "8 jobs) cannot be run as they are" in text
    lines = text.splitlines()[1:]
    assert lines[0].startswith(f"7 jobs with {screening.TOO_LARGE}: big0 (16 a100), big1")
    assert lines[0].endswith("big4 (16 a100), ...")
    assert lines[1] == f"1 job with {screening.UNKNOWN_MODEL}: x (moe 2.4B 256)"


def test_unsorted_jobs_are_refused_or_sorted_and_named_but_never_lost() -> None:
    jobs = [an_arrival("a", 5.0), an_arrival("b", 3.0), an_arrival("c", 4.0), an_arrival("d", 5.0)]
    with pytest.raises(InvalidInput, match="2 jobs listed after a job that arrives later: b, c"):
        screen_jobs(jobs, PROFILES, [a_type()], NODES)
    screened_jobs = screen_jobs(jobs, PROFILES, [a_type()], NODES, "drop")
    assert [a.spec.name for a in screened_jobs.arrivals] == ["b", "c", "a", "d"]
    assert (screened_jobs.dropped, screened_jobs.reordered) == ([], ["b", "c"])


def test_jobs_without_models_must_have_a_duration_and_be_unique() -> None:
    jobs = [an_asked("a", 2.0), an_asked("b", 1.0, duration_s=0.0), an_asked("a", 3.0)]
    screened_jobs = screen_durations(jobs, "drop")
    assert screened_jobs.arrivals == [jobs[0]]
    assert [one.reason for one in screened_jobs.dropped] == [screening.EMPTY, screening.REPEATED]
    with pytest.raises(InvalidInput, match="no duration: b"):
        screen_durations(jobs)


def test_without_a_cluster_only_profiles_or_form_are_checked() -> None:
    jobs = [an_arrival("a", gpus=16), an_arrival("b", work=OTHER), an_arrival("c", iterations=0)]
    assert [a.spec.name for a in screen_profiled(jobs, PROFILES, "drop").arrivals] == ["a"]
    assert [a.spec.name for a in screen_form(jobs, "drop").arrivals] == ["a", "b"]


def test_a_recipe_redraws_jobs_whose_type_the_cluster_lacks() -> None:
    speeds = Speeds(
        [a_record(1, "v100", 2.0), a_record(1, "a100")], ClusterRoom.of(a_cluster("a100"))
    )
    found, _ = apply_recipe(Recipe(redraw=True), some_arrivals(5, gpu_type="v100"), speeds)
    assert {(a.spec.requested_gpu_type, a.spec.iterations) for a in found} == {("a100", 200)}
