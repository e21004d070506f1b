"""Parameters of published schedulers: their declaration next to each scheduler, and their checks.

A scheduler with parameters is a dataclass. A field that is annotated with a ``ParameterRule`` is a
parameter. Other fields are not: names, and the switches of variants that have names of their own in
the registry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Literal, TypeAlias, get_type_hints

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.parameters import PARAMETERS_FIELD, parse_parameters
from tessera.formulation.state.topologies.fields import similar_word_hint

ParameterValue: TypeAlias = bool | int | float | str

_FLAGS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRule:
    """The values that a parameter may have, with one line on its meaning and one on its source.

    ``low`` and ``high`` are the bounds of numbers. ``words`` are the allowed texts of a word.
    """

    kind: Literal["whole", "number", "flag", "word"]
    meaning: str
    source: str
    low: float = -math.inf
    high: float = math.inf
    words: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """Return the allowed values in words, e.g. ``a whole number from 0 to 16``."""
        match self.kind:
            case "flag":
                return "true or false"
            case "word":
                return f"{', '.join(self.words[:-1])} or {self.words[-1]}"
        number = "a whole number" if self.kind == "whole" else "a number"
        if math.isinf(self.high):
            return f"{number} of at least {self.low:,g}"
        return f"{number} from {self.low:,g} to {self.high:,g}"

    @property
    def extremes(self) -> tuple[str, ...]:
        """Return the texts of the lowest and the highest value, or of all values if they are few."""
        if self.kind in ("whole", "number"):
            return f"{self.low:.12g}", f"{self.high:.12g}"
        return self.words or tuple(_FLAGS)

    def read(self, text: str) -> ParameterValue | None:
        """Return the value that ``text`` has, or None if it is not allowed."""
        if self.kind == "flag":
            return _FLAGS.get(text)
        if self.kind == "word":
            return text if text in self.words else None
        try:
            value = int(text) if self.kind == "whole" else float(text)
        except ValueError:
            return None
        return value if self.low <= value <= self.high else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParameter:
    """A parameter of a published scheduler, which a round may set.

    If ``default`` is None, ``rule.meaning`` says what happens without a value.
    """

    name: str
    default: ParameterValue | None
    rule: ParameterRule

    @property
    def shown_default(self) -> str:
        """Return the default as a round would state it, or "" if it is None."""
        match self.default:
            case None:
                return ""
            case bool():
                return str(self.default).lower()
            case float():
                return f"{self.default:g}"
        return str(self.default)


def declared_parameters(
    scheduler: type, arguments: Mapping[str, Any]
) -> tuple[SchedulerParameter, ...]:
    """Return the parameters of a class of schedulers, whose defaults ``arguments`` replace."""
    if not is_dataclass(scheduler):
        return ()
    hints = get_type_hints(scheduler, include_extras=True)
    return tuple(
        SchedulerParameter(
            name=known.name, default=arguments.get(known.name, known.default), rule=rule
        )
        for known in fields(scheduler)
        for rule in getattr(hints[known.name], "__metadata__", ())
        if isinstance(rule, ParameterRule)
    )


def read_parameters(
    scheduler: str, known: tuple[SchedulerParameter, ...], text: str
) -> dict[str, ParameterValue]:
    """Return name -> value of the parameters that ``text`` sets for the scheduler of that name.

    Raises:
        InvalidInput: the notation is wrong, the scheduler has no such parameter, or a value is not
            allowed. The message says which parameters or values there are.
    """
    rules = {parameter.name: parameter.rule for parameter in known}
    values: dict[str, ParameterValue] = {}
    for name, written in parse_parameters(text).items():
        if not rules:
            raise InvalidInput(
                PARAMETERS_FIELD,
                f"the scheduler {scheduler} has no parameters; leave out {name!r}",
            )
        if name not in rules:
            raise InvalidInput(
                PARAMETERS_FIELD,
                f"the scheduler {scheduler} has no parameter {name!r}{similar_word_hint(name, rules)}"
                f" (its parameters: {', '.join(rules)})",
            )
        value = rules[name].read(written)
        if value is None:
            raise InvalidInput(
                PARAMETERS_FIELD, f"{name} must be {rules[name].allowed}, not {written!r}"
            )
        values[name] = value
    return values
