"""The simple commands of a shell script, in the order of the text.

Compound commands such as ``if`` are not understood: each command only knows the one around it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_DEPTH: Final = 20
"""Deepest nesting of quotations, substitutions and brackets."""

_BLANK: Final = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)+")
_BLANK_LINES: Final = re.compile(r"(?:\s|\\\n|#[^\n]*)*")
_REDIRECTION: Final = re.compile(r"[0-9]*(?:<<<|<<-?|<>|<&|>>|>&|>\||[<>])|&>>?")
_OPERATOR: Final = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;|&\n]")
_FUNCTION: Final = re.compile(r"function\s+([^\s()]+)(?:\s*\(\s*\))?\s*|([\w.:-]+)\s*\(\s*\)\s*")
_LIST: Final = re.compile(r"[A-Za-z_]\w*\+?=\(")
_ENDS_OF_WORDS: Final = " \t\r\n;|&()<>"
_CLOSERS: Final = {"{": "}", "if": "fi", "case": "esac"} | dict.fromkeys(
    ("for", "while", "until", "select"), "done"
)
_OPAQUE: Final = re.compile(
    r"[\w./:,@%+=-]+|\\.|`(?:[^`\\]|\\.)*`|\$\[[^\]\n]{0,99}\]|('[^']*'|\$'(?:[^'\\]|\\.)*')",
    re.DOTALL,
)
"""Texts without brackets or quotation marks of their own. In double quotes, the group is not one."""
_USE: Final = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])")
_OPENER: Final = re.compile(r"\$[({]|[\"(]")
_IN_BRACKETS: Final = re.compile(r"(?<=[\s(])#.*|<<-?(?!<)\s*[\\'\"A-Za-z_]")


def end_of(text: str, at: int, ends: str, *, quoted: bool = False, depth: int = 0) -> int:
    """Return the place of the first of ``ends`` that neither a quotation nor a bracket holds.

    Raises:
        ValueError: no such character follows.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"there are more than {MAX_DEPTH} levels of nesting")
    while at < len(text) and text[at] not in ends:
        opaque, opener = _OPAQUE.match(text, at), _OPENER.match(text, at)
        other = _IN_BRACKETS.match(text, at) if ends == ")" else None
        if opaque is not None and not (quoted and opaque[1]):
            at = opaque.end()
        elif opener is not None and (opener[0] != "(" or ends == ")"):
            closer = {"(": ")", "{": "}", '"': '"'}[opener[0][-1]]
            inner = closer == '"' or (quoted and closer == "}")
            at = end_of(text, opener.end(), closer, quoted=inner, depth=depth + 1) + 1
        elif text[at] == "`" or (text[at] == "'" and not quoted):
            raise ValueError("a quotation has no end")
        elif other is not None and other[0][0] == "<":
            raise ValueError("a here-document in brackets is not read")
        else:
            at = at + 1 if other is None else other.end()
    if at >= len(text):
        raise ValueError(f"{ends[-1]!r} is missing")
    return at


def end_of_use(text: str, at: int, *, quoted: bool) -> int:
    """Return the end of what a dollar or a backquote begins. Raises ValueError."""
    match = _USE.match(text, at) or _OPAQUE.match(text, at)
    if match is not None and not (quoted and "'" in match[0][:2]):
        return match.end()
    if text.startswith(("$(", "${"), at):
        closer = ")" if text[at + 1] == "(" else "}"
        return end_of(text, at + 2, closer, quoted=quoted and closer == "}") + 1
    return at + 1


def split_words(text: str) -> list[str]:
    """Return the words of a list, as they are written."""
    words, at = [], 0
    text += "\n"
    while (match := _BLANK_LINES.match(text, at)) and match.end() < len(text):
        at = end_of(text, match.end(), " \t\n")
        words.append(text[match.end() : at])
    return words


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command with its words as they are written.

    ``inside`` is a compound command or function around it, or "". ``is_certain`` is set if the
    command runs where it stands, and in the script's own shell.
    """

    line: int
    words: tuple[str, ...]
    inside: str
    is_certain: bool


class CommandReader:
    """A position in a script, with the commands and the names of functions before it."""

    def __init__(self, text: str) -> None:
        self.commands: list[Command] = []
        self.functions: set[str] = set()
        self._text = f"{text}\n\n"
        self._at = 0
        self._start = 0
        self._words: list[str] = []
        self._before = ";"
        self._open: list[tuple[str, str]] = []
        """The ends of the compound commands at this position, and what these commands are."""
        self._function = ""
        """The name of a function whose body follows."""
        self._documents: list[tuple[str, bool]] = []
        """The words after ``<<``, and whether tabs may precede the ends of these documents."""

    @property
    def line(self) -> int:
        """Return the number of lines up to the command at this position."""
        return self._text.count("\n", 0, self._start) + 1

    def read(self) -> None:
        """Read the whole text.

        Raises:
            ValueError: it is not a script.
        """
        while self._skip():
            self._start = self._start if self._words else self._at
            self._step()
        if self._open:
            raise ValueError(f"{self._open[-1][0]!r} is missing")

    def _skip(self) -> bool:
        """Skip blanks and comments. Return whether something follows."""
        match = _BLANK.match(self._text, self._at)
        self._at = self._at if match is None else match.end()
        return self._at < len(self._text)

    def _step(self) -> None:
        """Read an operator, a word, or a redirection with its word."""
        text, start = self._text, self._at
        if self._words[:1] == ["[["] and self._words[-1] != "]]":
            self._at = start + 1 if text[start] == "\n" else end_of(text, start, " \t\n;")
            self._words.append(text[start : self._at])
        elif not self._words and (match := _FUNCTION.match(text, start)):
            self._at = match.end()
            self._function = match[1] or match[2]
            self.functions.add(self._function)
        elif match := _REDIRECTION.match(text, start):
            self._redirect(match)
        elif match := _OPERATOR.match(text, start):
            self._at = match.end()
            self._finish(match[0])
            if match[0] == "\n":
                self._skip_documents()
        elif text.startswith("((", start) and self._words in ([], ["for"]):
            self._at = end_of(text, start + 1, ")") + 1
            self._words.append(text[start : self._at])
        elif text[start] == "(":
            self._at += 1
            if self._words and not (self._open and self._open[-1][0] == "esac"):
                raise ValueError("'(' is not quoted")
            self._enter(")", "brackets")
        elif text[start] == ")":
            self._at += 1
            self._close(")")
        else:
            self._take(self._word())

    def _word(self) -> str:
        start, match = self._at, _LIST.match(self._text, self._at)
        stop = end_of(self._text, start, _ENDS_OF_WORDS) if match is None else match.end()
        self._at = stop if match is None else end_of(self._text, stop, ")") + 1
        if self._at == start:
            raise ValueError(f"{self._text[start]!r} is not expected here")
        return self._text[start : self._at]

    def _take(self, word: str) -> None:
        """Add a word to the command, unless it belongs to a compound command."""
        key = "" if self._words else word
        if key in _CLOSERS:
            self._enter(_CLOSERS[key], f"`{key}`")
            self._words += [key] if key in ("for", "select", "case") else []
        elif key in _CLOSERS.values():
            self._close(key)
        elif key in ("then", "else", "elif", "do"):
            if not self._open:
                raise ValueError(f"{key!r} is not expected here")
        elif key not in ("!", "time"):
            self._words.append(word)

    def _enter(self, closer: str, what: str) -> None:
        what = f"the function {self._function}" if self._function else what
        self._open.append((closer, f"{what} (line {self.line})"))
        self._function = ""

    def _close(self, closer: str) -> None:
        if closer == ")" and self._open and self._open[-1][0] == "esac":
            self._words = []  # a pattern
            return
        self._finish(";")
        if not self._open or self._open.pop()[0] != closer:
            raise ValueError(f"{closer!r} is not expected here")
        self._before = ";"

    def _finish(self, operator: str) -> None:
        """End a command."""
        if self._words:
            is_alone = self._before in (";", "&", "\n") and operator in (";", "\n")
            around = [what for _, what in self._open]
            functions = [what for what in around if what.startswith("the function")]
            inside = "".join([*functions, *around][:1])
            is_certain = is_alone and not inside
            self.commands.append(Command(self.line, tuple(self._words), inside, is_certain))
        if self._words or operator != "\n":
            self._before = operator
        self._words = []

    def _redirect(self, match: re.Match[str]) -> None:
        is_numbered = self._text[self._at - 1] == "}" and "{" in "".join(self._words[-1:])
        self._at = match.end()
        self._skip()
        if self._text.startswith(("<(", ">("), self._at):
            self._at = end_of(self._text, self._at + 2, ")") + 1
            return
        target = self._word()
        if is_numbered or "((" in target:
            raise ValueError("a redirection sets a variable")
        if match[0].lstrip("0123456789") in ("<<", "<<-"):
            self._documents.append((target, match[0].endswith("-")))

    def _skip_documents(self) -> None:
        """Skip the texts of here-documents."""
        for word, has_tabs in self._documents:
            end = re.sub(r"[\\'\"]", "", word)
            while self._at < len(self._text):
                stop = self._text.index("\n", self._at)
                line = self._text[self._at : stop]
                self._at = stop + 1
                if (line.lstrip("\t") if has_tabs else line) == end:
                    break
                if end == word and re.search(r"\(\([^)]*(?:\+\+|--|=)|\\$", line):
                    raise ValueError("a here-document sets a variable, or joins lines")
        self._documents = []
