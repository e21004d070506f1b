"""Checks of the collectives of plans: each degree of a plan is compiled once and compared.

This module does not import JAX: a process of its own compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from tessera.estimator.compiling.comparison import (
    CollectiveCheck,
    StepDegrees,
    compare_collectives,
)
from tessera.estimator.compiling.compile import CompileRequest, compile_step
from tessera.estimator.compiling.compiled import CompiledStep, Uncompilable
from tessera.estimator.graph import Graph

Check: TypeAlias = "CollectiveCheck | FailedCheck"

CHECK_LIMIT_S: Final = 600.0
"""Seconds for the compilation of a step. Published models of about a billion parameters took 8 to
20 s."""

Compiler = Callable[[CompileRequest], CompiledStep]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCheck:
    """Degrees that could not be compared, and why."""

    degrees: StepDegrees
    problem: str


def compile_within_limit(request: CompileRequest) -> CompiledStep:
    """Return the compiled step, within :data:`CHECK_LIMIT_S`.

    Raises:
        Uncompilable: the step cannot be compiled, or not in that time.
        Unavailable: JAX is not installed.
    """
    return compile_step(request, timeout_s=CHECK_LIMIT_S)


def check_degrees(
    graph: Graph,
    target: str,
    arguments: Mapping[str, Any],
    degrees: StepDegrees,
    compiler: Compiler = compile_within_limit,
) -> Check:
    """Return the comparison of ``graph`` with its compiled step, or the reason of its absence.

    Raises:
        Unavailable: JAX is not installed.
    """
    request = CompileRequest(
        target=target,
        arguments={**arguments, "samples": degrees.samples},
        dp=degrees.dp,
        tp=degrees.tp,
        zero=degrees.zero,
    )
    try:
        compiled = compiler(request)
    except Uncompilable as error:
        return FailedCheck(degrees=degrees, problem=str(error))
    return compare_collectives(graph, degrees, compiled)


def checks_note(checks: Iterable[Check]) -> str:
    """Return the part of a provenance that says how collectives compare, or "" without checks.

    A check that failed says nothing.
    """
    notes = []
    for check in checks:
        if isinstance(check, FailedCheck):
            continue
        if check.differing:
            notes += [f"collectives at {check.degrees} differ: {g}" for g in check.differing]
        elif check.groups:
            notes.append(f"collectives at {check.degrees} as compiled by XLA")
    return ", ".join(notes)


def check_document(check: Check) -> dict[str, Any]:
    """Return a check as JSON's plain values."""
    degrees = check.degrees
    plain: dict[str, Any] = {
        "data_parallel": degrees.dp,
        "tensor_parallel": degrees.tp,
        "zero": degrees.zero,
        "samples": degrees.samples,
    }
    if isinstance(check, FailedCheck):
        return plain | {"problem": check.problem}
    groups = [
        {
            "group": group.kind,
            "size": group.size,
            "estimated_bytes": group.estimated_bytes,
            "compiled_bytes": group.compiled_bytes,
            "compiled_payload_bytes": dict(group.primitives),
            "differs": group.differs,
        }
        for group in check.groups
    ]
    return plain | {"groups": groups, "skipped": check.skipped, "versions": dict(check.versions)}
