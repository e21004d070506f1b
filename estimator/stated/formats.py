"""The formats of files that state execution plans: Tessera's JSON, and a command of Megatron-LM."""

from __future__ import annotations

import shlex
from typing import Final

from tessera.estimator.stated.megatron import (
    LAUNCHER,
    is_megatron,
    parse_arguments,
    read_megatron,
)
from tessera.estimator.stated.statement import StatedPlan, quote_value
from tessera.formulation.base.documents import STATED_PLAN, to_utf8
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ExecutionPlan, read_execution_plan

_PUNCTUATION: Final = ";&|<>"
"""Characters that join commands or redirect them, unless they are quoted."""
_REMEDY: Final = "give the command line that is started, e.g. as `bash -x` or `ps -ww` shows it"


def read_stated_plan(field: str, text: str) -> StatedPlan | ExecutionPlan:
    """Return the plan, or the part of one, that a text states.

    A text that begins with a brace is Tessera's JSON. Any other is a command line of Megatron-LM,
    or a list of its arguments.

    Raises:
        InvalidInput: the text is too large or in none of the two formats, or an argument cannot be
            read. The error names the argument.
    """
    to_utf8(field, text, STATED_PLAN)
    if text.lstrip().startswith("{"):
        return read_execution_plan(field, text)
    arguments = _arguments_of(_split_words(field, text))
    if not is_megatron(arguments):
        raise InvalidInput(
            field,
            "is neither Tessera's JSON, which begins with {, nor a command with arguments of Megatron-LM"
            f" such as --tensor-model-parallel-size; {_REMEDY}, or state options such as --tp",
        )
    return read_megatron(field, arguments)


def _split_words(field: str, text: str) -> list[str]:
    """Return the words of a command, which may have comments, quotations and continued lines.

    Raises:
        InvalidInput: a shell would have to expand a word, or to run several commands.
    """
    reader = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_PUNCTUATION)
    reader.whitespace_split = True
    try:
        words = list(reader)
    except ValueError as wrong:
        raise InvalidInput(field, f"is not a command line: {wrong}") from wrong
    for word in words:
        if "$" in word or "`" in word:
            raise InvalidInput(
                field, f"has {quote_value(word)}, whose value only a shell knows; {_REMEDY}"
            )
        if not word.strip(_PUNCTUATION):
            raise InvalidInput(field, f"has {word!r}, which is no argument; {_REMEDY}")
    return words


def _arguments_of(words: list[str]) -> dict[str, object]:
    """Return the arguments of a program, and the arguments of its launcher that state GPUs."""
    program = next((k for k, word in enumerate(words) if word.endswith(".py")), -1)
    launcher = parse_arguments(words[: max(program, 0)])
    stated = {name: value for name, value in launcher.items() if name in LAUNCHER}
    return stated | parse_arguments(words[program + 1 :])
