"""Reader of the arguments in a shell script, without a shell.

Assignments of plain texts and lists are understood, and so are their uses (``$NAME``, ``${NAME}``,
``${NAME[@]}``, ``${NAME:-default}``). Nothing is executed, and all branches of conditions count. A
value that a shell would have to compute stays as it is, and is an error only if a plan needs it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Final

from tessera.formulation.errors import InvalidInput

MAX_WORDS: Final = 20_000
"""Largest number of words of a script, with those of the variables that it uses."""

_PIECE: Final = re.compile(
    r"""'[^']*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+"|\\.|(?<!\S)\#[^\n]*+|[0-9]++(?:>&[0-9])?|>&[0-9]|[^'"\\\#\n;|&()>0-9]++|.""",
    re.DOTALL,
)
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_USE: Final = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^}]*))?\})")
_KEYWORDS: Final = frozenset({"export", "local", "declare", "-a", "readonly", "then", "do", "else"})
_PROGRAM: Final = ".py"
_REDIRECTION: Final = re.compile(r"[0-9]*[<>]")


def read_words(field: str, text: str) -> list[str]:
    """Return the words of the arguments in a script, a command line or a plain list.

    If a command starts a Python program, the words after its name are its arguments, and the
    arguments before it are the launcher's. Of several such commands, the last one counts. Else the
    text is a list of arguments.

    Raises:
        InvalidInput: a quotation is not closed, or there are too many words.
    """
    script = _Script(field)
    commands = [words for line in _lines(text) if (words := script.read_line(line))]
    started = [arguments for words in commands if (arguments := _program_arguments(words))]
    if started:
        return started[-1]
    return [word for words in commands for word in words] or script.listed_arguments


def has_conditions(text: str) -> bool:
    """Return whether a script has conditions, of which all branches are read."""
    return any(line.split()[:1] in (["if"], ["case"]) for line in _lines(text))


def _lines(text: str) -> Iterator[str]:
    """Yield the commands of a script, without comments. A list in brackets is part of one."""
    line: list[str] = []
    depth = 0
    for match in _PIECE.finditer(text.replace("\r\n", "\n")):
        piece = match[0]
        depth = max(0, depth + (piece == "(") - (piece == ")"))
        if piece in "\n;|&" and depth == 0:
            yield "".join(line)
            line = []
        elif piece == "\\\n":  # a command that continues on the next line
            line.append(" ")
        elif not piece.startswith("#") or piece == "#":
            line.append(piece.replace("\\\n", " "))
    yield "".join(line)


def _program_arguments(words: list[str]) -> list[str]:
    """Return the arguments of a command that starts a Python program, else no words."""
    program = next((i for i, word in enumerate(words) if word.endswith(_PROGRAM)), None)
    if program is None:
        return []
    python = (i for i, word in enumerate(words[:program]) if "python" in word or "torchrun" in word)
    launcher = words[next(python, program) : program]
    return _from_first_argument(launcher) + _from_first_argument(words[program + 1 :])


def _from_first_argument(words: list[str]) -> list[str]:
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    last = next((i for i, word in enumerate(words) if _REDIRECTION.match(word)), len(words))
    return words[first:last]


class _Script:
    """The variables of a script so far."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._variables: dict[str, list[str]] = {}
        self._left = MAX_WORDS

    @property
    def listed_arguments(self) -> list[str]:
        """Return the arguments in variables, for a text that uses none of them."""
        lists = self._variables.values()
        return [
            word for words in lists if words[:1] and words[0].startswith("--") for word in words
        ]

    def read_line(self, line: str) -> list[str]:
        """Return a command's words, after the assignments that begin it were stored."""
        try:
            words = shlex.split(line, posix=True)
        except ValueError as error:
            raise InvalidInput(self._field, f"is not a list of arguments: {error}") from error
        while words:
            match = _ASSIGNMENT.fullmatch(words[0])
            if words[0] not in _KEYWORDS and match is None:
                break
            words = words[1:] if match is None else self._assign(match, words)
        return self._expand(words)

    def _assign(self, match: re.Match[str], words: list[str]) -> list[str]:
        """Store a variable's words. Return the words after the assignment."""
        name, added, value = match.groups()
        if value.startswith("("):
            last = (i for i, word in enumerate(words) if word.endswith(")"))
            end = next(last, len(words) - 1)
            listed = [value, *words[1 : end + 1]]
            listed[0] = listed[0][1:]
            listed[-1] = listed[-1].removesuffix(")")
        else:
            end, listed = 0, [value]
        parts = [part for word in self._expand(listed) for part in word.split()]
        self._variables[name] = (self._variables.get(name, []) if added else []) + parts
        return words[end + 1 :]

    def _expand(self, words: list[str]) -> list[str]:
        return [part for word in words for part in self._expand_word(word)]

    def _expand_word(self, word: str) -> list[str]:
        match = _USE.fullmatch(word)
        if match is None:
            return self._count([_USE.sub(self._text, word)])
        known = self._variables.get(match[1] or match[2])
        if known is not None:
            return self._count(list(known))
        return self._count([word if match[3] is None else match[3]])

    def _text(self, match: re.Match[str]) -> str:
        known = self._variables.get(match[1] or match[2])
        if known is not None and len(known) == 1:
            return known[0]
        return match[0] if match[3] is None else match[3]

    def _count(self, words: list[str]) -> list[str]:
        """Return the words. Refuse them if a text uses its variables too often or too deeply."""
        self._left -= len(words) + sum(map(len, words)) // 100
        if self._left < 0:
            raise InvalidInput(self._field, f"has more than {MAX_WORDS:,} words or very long ones")
        return words
