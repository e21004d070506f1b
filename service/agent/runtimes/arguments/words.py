"""Values of an execution plan in the words of a job's command, e.g. ``{plan.micro_batch}``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ExecutionPlan

INTERNAL_FIELDS: Final = ("stages", "micro_batch", "shape", "model")
"""Fields of a plan that no word holds as they are."""

PLACEHOLDER: Final = re.compile(r"\{plan\.([^{}]*)\}")


def plan_values(plan: ExecutionPlan) -> dict[str, str]:
    """Return the values of all place holders. Degrees are absent if the stages have different ones.

    ``micro_batch`` is the number of samples of a micro-batch in each replica.
    """
    values = {
        "gpus": plan.gpus,
        "layers": plan.layers,
        "pp": plan.pipeline_degree,
        "global_batch": plan.global_batch,
    }
    values |= {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in INTERNAL_FIELDS}
    for name in ("dp", "tp", "ep", "cp", "sp"):
        degrees = {getattr(stage, name) for stage in plan.stages}
        if len(degrees) == 1:
            values[name] = degrees.pop()
    if "dp" in values:
        values["micro_batch"] = plan.micro_batch // int(values["dp"])
    return {name: str(value).lower() for name, value in values.items()}


def fill_words(words: Iterable[str], plan: ExecutionPlan | None) -> tuple[str, ...]:
    """Return the words of a command with the plan's values in them.

    Raises:
        InvalidInput: a place holder is unknown, or there is no plan.
    """
    values = {} if plan is None else plan_values(plan)

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if name in values:
            return values[name]
        if plan is None:
            problem = (
                "needs an execution plan, and the job runs without one; give the job a model whose Cells"
                " have plans, or write the value"
            )
        else:
            problem = f"is not a value of this plan; the values are {', '.join(sorted(values))}"
        raise InvalidInput("command", f"{match[0][:80]} {problem}")

    return tuple(PLACEHOLDER.sub(value_of, word) for word in words)


def read_flags(words: Iterable[str]) -> dict[str, str]:
    """Return the arguments among words by name, with ``--`` and dashes. A flag alone has "".

    Of an argument that is repeated, the last value counts. Values after the first one are left out.
    """
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            flags[name] = value
            name = "" if equals else name
        elif name and not flags[name] and not _is_option(word):
            flags[name] = word
    return flags


def _is_option(word: str) -> bool:
    """Return whether a word is a short option, and not a negative number."""
    return word.startswith("-") and not word[1:2].isdigit()
