"""Fits of the models of reconfigurable training, and the runs that they need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera.estimator.reconfiguration.appendix import appendix_iteration_s
from tessera.estimator.reconfiguration.configurations import Configuration, ConfigurationTable
from tessera.estimator.reconfiguration.fitting import (
    MeasuredRun,
    check_offloaded,
    check_variety,
    fit_appendix,
    log_error,
    needs_refit,
)
from tessera.estimator.reconfiguration.pooled import POOLED_PARAMETERS, pooled_parts, reached_ports
from tessera.estimator.reconfiguration.pooling import choose_runs, fit_pooled
from tessera.formulation.base.errors import InvalidInput
from tests.support.configurations import (
    SEVEN,
    TRUE,
    a_configuration,
    a_table,
    a_transformer,
    an_offloaded,
    runs_of,
)

UNSEEN = [a_configuration(4), a_configuration(4, 4), an_offloaded(2), an_offloaded(2, 2)]


def test_seven_runs_without_noise_give_the_parameters_back() -> None:
    fit = fit_appendix(runs_of(TRUE, SEVEN))

    assert fit.rmsle < 1e-3
    table = ConfigurationTable.of(UNSEEN)
    assert appendix_iteration_s(table, fit.parameters) == pytest.approx(
        appendix_iteration_s(table, TRUE), rel=0.02
    )
    assert fit.parameters.backward_ratio == pytest.approx(TRUE.backward_ratio, rel=0.05)


def test_a_fit_depends_on_nothing_but_its_runs() -> None:
    runs = runs_of(TRUE, SEVEN)

    assert fit_appendix(runs) == fit_appendix(list(runs))


def test_the_loss_is_the_root_of_the_mean_squared_logarithm() -> None:
    predicted, measured = np.array([np.e, 1.0]), np.array([1.0, 1.0])

    assert log_error(predicted, measured) == pytest.approx(0.5**0.5)


def with_time(run: MeasuredRun, iter_time_s: float) -> MeasuredRun:
    return replace(run, iter_time_s=iter_time_s)


def test_runs_that_are_too_few_say_how_many_are_enough() -> None:
    with pytest.raises(InvalidInput, match=r"has 5 of the 7 measured runs .* measure 2 more"):
        check_variety(runs_of(TRUE, SEVEN[:5]))


def test_runs_of_one_plan_ask_for_another_plan() -> None:
    same = [a_configuration(gpus) for gpus in (1, 2, 4, 8, 16)]
    same += [a_configuration(2, 2), a_configuration(4, 4)]

    with pytest.raises(InvalidInput, match=r"all of the plan dp, .* e\.g\. zero2\+offload"):
        check_variety(runs_of(TRUE, same))


def test_too_few_runs_with_offloading_ask_for_more() -> None:
    runs = runs_of(TRUE, [*SEVEN[:6], a_configuration(2)])

    with pytest.raises(InvalidInput, match=r"has 2 of the 3 runs with ZeRO-Offload .* 1 more"):
        check_offloaded(runs)


@pytest.mark.parametrize("iter_time_s", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_not_positive_are_refused(iter_time_s: float) -> None:
    first, *rest = runs_of(TRUE, SEVEN)
    runs = [with_time(first, iter_time_s), *rest]

    with pytest.raises(InvalidInput, match=r"iter_time_s: must be above 0 s.* dp on 1 GPUs"):
        check_variety(runs)
    with pytest.raises(InvalidInput, match="iter_time_s"):
        fit_pooled(runs)


def test_runs_of_two_models_are_not_fitted_together() -> None:
    other = replace(SEVEN[0], facts=a_transformer(name="other"))

    with pytest.raises(InvalidInput, match="are of m, other"):
        check_variety(runs_of(TRUE, [other, *SEVEN[1:]]))


def test_a_fit_is_repeated_only_when_the_error_passes_the_threshold() -> None:
    assert not needs_refit(0.1)
    assert needs_refit(-0.11)
    assert needs_refit(0.06, threshold=0.05)
    with pytest.raises(InvalidInput, match="threshold"):
        needs_refit(0.1, threshold=0.0)
    with pytest.raises(InvalidInput, match="error"):
        needs_refit(float("nan"))


def pooled_runs(configurations: list[Configuration], **changed: float) -> list[MeasuredRun]:
    """Return runs that take as long as our model says with some of its parameters changed."""
    table = ConfigurationTable.of(configurations)
    values = {
        p.name: np.full(len(configurations), changed.get(p.name, p.value))
        for p in POOLED_PARAMETERS
    }
    parts = pooled_parts(table, values)
    return [
        MeasuredRun(configuration=c, iter_time_s=t, busy_s=b, update_s=u)
        for c, t, b, u in zip(
            configurations,
            parts.iteration_s.tolist(),
            parts.busy_s.tolist(),
            parts.update_s.tolist(),
            strict=True,
        )
    ]


def test_our_model_learns_what_a_model_deviates_in() -> None:
    changed = {"passes_ratio": 5.0, "sync_factor": 0.6, "host_core_s_per_parameter": 8e-9}
    fit = fit_pooled(pooled_runs(SEVEN, **changed))

    truth = [run.iter_time_s for run in pooled_runs(UNSEEN, **changed)]
    assert fit.predict_s(UNSEEN) == pytest.approx(truth, rel=0.05)
    assert fit_pooled([]).predict_s(UNSEEN) != pytest.approx(truth, rel=0.2)


def test_a_model_without_runs_has_what_the_others_share() -> None:
    names = ("a", "b", "c", "d")
    known = [replace(c, facts=a_transformer(name=name)) for name in names for c in SEVEN]
    new = [replace(c, facts=a_transformer(name="new")) for c in UNSEEN]
    truth = np.array([run.iter_time_s for run in pooled_runs(new, port_share=0.3)])

    before = np.abs(fit_pooled([]).predict_s(new) / truth - 1)
    after = np.abs(fit_pooled(pooled_runs(known, port_share=0.3)).predict_s(new) / truth - 1)

    assert 2 * after.max() < before.max()


def test_one_run_that_went_wrong_hardly_changes_the_others() -> None:
    runs = pooled_runs(SEVEN)
    wrong = [*runs[:-1], with_time(runs[-1], 3 * runs[-1].iter_time_s)]

    plain = [a_configuration(4), a_configuration(4, 4)]
    assert fit_pooled(wrong).predict_s(plain) == pytest.approx(
        fit_pooled(runs).predict_s(plain), rel=0.05
    )


def test_a_group_of_replicas_reaches_the_ports_near_its_own_gpus() -> None:
    table = a_table(
        a_configuration(8, 8),
        a_configuration(3, 5),
        a_configuration(1, 1),
        a_configuration(8, 8, tp=4),
        a_configuration(4, 4, tp=4),
        a_configuration(6, 6, tp=4, pp=1, dp=3),
    )

    assert reached_ports(table) == pytest.approx([4, 2, 1, 1, 0.5, 0.5])


CHOICES = [*SEVEN, *UNSEEN, a_configuration(2), a_configuration(1, 1), an_offloaded(1, 1)]


def test_seven_different_runs_are_chosen_with_three_offloaded() -> None:
    chosen = choose_runs(CHOICES)

    assert len(set(chosen)) == 7
    assert sum(CHOICES[i].offload for i in chosen) >= 3
    assert chosen == choose_runs(CHOICES)
    check_variety(runs_of(TRUE, [CHOICES[i] for i in chosen]))


def test_fewer_offloaded_runs_are_chosen_where_there_are_no_more() -> None:
    plain = [c for c in CHOICES if not c.offload]

    assert len(choose_runs([*plain, an_offloaded(8)])) == 7


def test_too_few_choices_ask_for_more() -> None:
    with pytest.raises(InvalidInput, match="has 3 configurations, but 7 are to be measured"):
        choose_runs(CHOICES[:3])
