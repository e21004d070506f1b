"""The option ``--check-collectives``: the collectives of the fastest plan, compared with XLA's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.progress import Progress

from tessera.estimator.compiling.checking import Check, FailedCheck, check_degrees, check_document
from tessera.estimator.compiling.comparison import (
    MAX_DIFFERENCE,
    GroupComparison,
    degrees_to_check,
)
from tessera.estimator.compiling.compiled import Uncompilable
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import PlanStage
from tessera.service.cli.estimateview import DegreeEstimates, short_plan
from tessera.service.cli.modelling import DescribedModel, require_jax
from tessera.service.cli.render import err, print_note

Checks = Sequence[Check]


def require_step(model: DescribedModel) -> None:
    """Check that the model has a step in JAX.

    Raises:
        InvalidInput: it has none.
        CallFailed: JAX is not installed.
    """
    if model.step is None:
        raise InvalidInput(
            "--check-collectives",
            "needs a training step in JAX with the model's own data type; give --step, or a published"
            " --model that has one, without --dtype",
        )
    require_jax()


def check_fastest(model: DescribedModel, answers: Iterable[DegreeEstimates]) -> Checks:
    """Return the checks of the fastest plan of all, in a process for each of its degrees.

    Raises:
        InvalidInput: the plan cannot be compiled.
    """
    plans = [plan for answer in answers for plan in answer.cells.values()]
    plan = min(plans, key=lambda plan: plan.iter_time_s, default=None)
    return () if plan is None else check_plan(model, plan.stages, model.states.zero)


def check_plan(model: DescribedModel, stages: Sequence[PlanStage], zero: int) -> Checks:
    """Return the checks of a plan with these stages, in a process for each of its degrees.

    Raises:
        InvalidInput: the plan cannot be compiled.
    """
    if model.step is None:
        raise AssertionError("require_step has checked it")
    try:
        degrees = degrees_to_check(stages, zero)
    except Uncompilable as error:
        raise InvalidInput("--check-collectives", str(error)) from error
    checks = list[Check]()
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(degrees))
        for each in degrees:
            arguments = dict(model.step.arguments)
            checks.append(check_degrees(model.graph, model.step.target, arguments, each))
            progress.advance(task)
    if not degrees:
        print_note(
            f"the plan {short_plan(stages)} has no collectives to compare with XLA's; what stages hand"
            " on is not compared"
        )
    return checks


def show_checks(checks: Checks) -> None:
    """Print each comparison, and whether its difference is above the threshold."""
    for check in checks:
        where = f"collectives of {check.degrees}"
        if isinstance(check, FailedCheck):
            print_note(f"{where} were not compared with XLA's: {check.problem}")
            continue
        for group in check.groups:
            print_note(f"{where}, {group}{_verdict(group)}")
        if check.skipped:
            print_note(f"{where}: not compared are {check.skipped}")


def _verdict(group: GroupComparison) -> str:
    if not group.differs:
        return ""
    share = f"{100 * MAX_DIFFERENCE:.0f} %"
    return f": differs by more than {share}, so its communication is estimated wrongly for XLA"


def checks_fields(checks: Checks | None) -> dict[str, Any]:
    """Return the fields of a JSON document for checks. If they are None, there are no fields."""
    if checks is None:
        return {}
    return {"collectives": [check_document(check) for check in checks]}
