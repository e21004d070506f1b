"""A stated plan: what a file or a command's options say about an execution plan.

Fields that nobody stated are None. :mod:`tessera.estimator.stated.completion` decides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import (
    MAX_COUNT,
    Offload,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedPlan:
    """The part of an execution plan that was stated, and what it says about the model.

    ``names`` has the source's own name of each field, for errors. ``usual`` has the values that the
    source assumes where nothing is stated.
    """

    gpus: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    chunks: int | None = None
    blocks_per_chunk: int | None = None
    cp: int | None = None
    ep: int | None = None
    expert_tp: int | None = None
    """GPUs that divide each expert. A plan divides experts over ``ep * expert_tp`` GPUs instead."""
    sp: bool | None = None
    schedule: Schedule | None = None
    zero: ZeroStage | None = None
    offload: Offload | None = None
    cpus_per_gpu: int | None = None
    """CPU cores for each GPU that update offloaded states."""
    recomputation: Recomputation | None = None
    precision: Precision | None = None
    micro_batch: int | None = None
    """Samples of a micro-batch in each replica."""
    accumulation: int | None = None
    global_batch: int | None = None
    first_blocks: int | None = None
    """Blocks of the first stage. If it is None, blocks are divided equally."""
    last_blocks: int | None = None
    embedding_blocks: int | None = None
    """The number of blocks as which the embedding counts in the division."""
    head_blocks: int | None = None
    equal_parts: bool | None = None
    """True if all parts must have as many blocks. Otherwise the first ones may have one more."""
    blocks: int | None = None
    heads: int | None = None
    experts: int | None = None
    sequence: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Sentences about what is assumed, for the user."""

    def name(self, field_name: str) -> str:
        """Return the source's own name of a field."""
        return self.names.get(field_name, field_name)

    def value(self, field_name: str, default: Any) -> Any:
        """Return what was stated, or what the source assumes, or else ``default``."""
        stated = getattr(self, field_name)
        return self.usual.get(field_name, default) if stated is None else stated

    @property
    def states_nothing(self) -> bool:
        """Return whether no field was stated."""
        return all(getattr(self, name) is None for name in STATED_FIELDS)


_ABOUT_FIELDS: Final = ("names", "usual", "notes")
STATED_FIELDS: Final = tuple(f.name for f in fields(StatedPlan) if f.name not in _ABOUT_FIELDS)


def combine(plans: Iterable[StatedPlan]) -> StatedPlan:
    """Return what all the plans state together.

    Raises:
        InvalidInput: two of them state different values of a field; names it as the later one does.
    """
    whole = StatedPlan()
    for plan in plans:
        for name in STATED_FIELDS:
            ours, theirs = getattr(whole, name), getattr(plan, name)
            if ours is not None and theirs is not None and ours != theirs:
                raise InvalidInput(
                    plan.name(name),
                    f"states {plain_value(theirs)}, but {whole.name(name)} states"
                    f" {plain_value(ours)}; state one of them, or the same value",
                )
        stated = {n: v for n in STATED_FIELDS if (v := getattr(plan, n)) is not None}
        whole = replace(
            whole,
            **stated,
            names={**plan.names, **whole.names},
            usual={**plan.usual, **whole.usual},
            notes=whole.notes + plan.notes,
        )
    return whole


def refuse_all(source: str, problems: Sequence[tuple[str, str]]) -> None:
    """Raise one error for all fields with problems, if there are any.

    Raises:
        InvalidInput: there is a problem. One problem is reported by its field, several by
            ``source``.
    """
    if len(problems) == 1:
        name, problem = problems[0]
        raise InvalidInput(name[:120], problem)
    if problems:
        raise InvalidInput(
            source, "; ".join(f"{name[:80]} {problem}" for name, problem in problems)
        )


def plain_value(value: object) -> str:
    """Return a value as a file would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value) if isinstance(value, Enum) else str(value)


def name_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def read_count(name: str, value: object, least: int = 1) -> int:
    """Return a whole number from a text or a plain value.

    Raises:
        InvalidInput: it is not one; names ``name``.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if type(value) is int and least <= value <= MAX_COUNT:
        return value
    raise InvalidInput(
        name, f"must be a whole number from {least} to {MAX_COUNT}, not {quote_value(value)}"
    )


def read_flag(name: str, value: object) -> bool:
    """Return a boolean from a plain value, or from ``true`` or ``false`` in any case."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, bool):
        return value
    raise InvalidInput(name, f"must be true or false, not {quote_value(value)}")


def read_choice(name: str, value: object, choices: Mapping[str, Any]) -> Any:
    """Return the meaning of one of some texts."""
    if isinstance(value, str) and value in choices:
        return choices[value]
    raise InvalidInput(name, f"must be one of {', '.join(choices)}, not {quote_value(value)}")


def quote_value(value: object) -> str:
    """Return a value in an error, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


Reader = Callable[[str, object], dict[str, Any]]
"""A reader of one field of a file: from its name and value to fields of :class:`StatedPlan`."""


def count_of(target: str, least: int = 1) -> Reader:
    """Return the reader of a whole number."""
    return lambda name, value: {target: read_count(name, value, least)}
