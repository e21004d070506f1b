"""Reader of the words of shell scripts: quotations, and the uses of variables and commands."""

from __future__ import annotations

import re
from typing import Final

from tessera.estimator.stated.shell.nodes import Arithmetic, Part, Substitution, Text, Use, Word
from tessera.formulation.errors import InvalidInput

MAX_DEPTH: Final = 20
"""Deepest nesting of commands, conditions and expansions."""

_OPERATOR: Final = re.compile(
    r"&&|\|\||;;&|;;|;&|\|&|&>>|&>|<<<|<<-|<<|<>|<&|>>|>&|>\||[;|&()<>\n]"
)
PLAIN: Final = re.compile(r"[^\s\\'\"$`;|&()<>]+")
_PLAIN_QUOTED: Final = re.compile(r"[^\\\"$`]+")
_PLAIN_IN_BRACES: Final = re.compile(r"[^\\'\"$`}]+")
_PLAIN_QUOTED_IN_BRACES: Final = re.compile(r"[^\\\"$`}]+")
_BRACKETS: Final = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[()]|[^'"\\()]+|.""", re.DOTALL)
_PLAIN_EXPRESSION: Final = re.compile(r"[^\\'\"$`()]+")
_PLAIN_DOCUMENT: Final = re.compile(r"[^\\$`]+")
PLAIN_INDEX: Final = re.compile(r"[^\\'\"$`\]]+")
_BLANK: Final = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_COMMENT: Final = re.compile(r"#[^\n]*")
_PARAMETER: Final = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]")
_OPERATORS_OF_USES: Final = re.compile(r":[-=?+]|[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@")
BOTH: Final = "'\""
"""The quotation marks."""


class WordReader:
    """A position in a script."""

    def __init__(self, field: str, text: str, line: int = 1, depth: int = 0) -> None:
        self._field = field
        self._text = text
        self._at = 0
        self._counted = (0, line)
        self._depth = depth

    def _line(self) -> int:
        """Return the number of the current line."""
        at, line = self._counted
        line += self._text.count("\n", at, self._at)
        self._counted = (self._at, line)
        return line

    def _error(self, problem: str) -> InvalidInput:
        return InvalidInput(
            self._field, f"is not a script that can be read: {problem} (line {self._line()})"
        )

    def _nested(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"there are more than {MAX_DEPTH} levels of nesting")

    def _rest_begins(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _skip_blanks(self) -> None:
        while True:
            match = _BLANK.match(self._text, self._at)
            if match is None:
                match = _COMMENT.match(self._text, self._at)
            if match is None:
                return
            self._at = match.end()

    def _operator(self) -> str:
        """Return the operator that is next after blanks, or ""."""
        self._skip_blanks()
        match = _OPERATOR.match(self._text, self._at)
        return "" if match is None else match[0]

    def _opens_process(self) -> bool:
        return self._rest_begins("<(") or self._rest_begins(">(")

    def _word(self, *, may_be_empty: bool = False) -> Word:
        if self._opens_process():
            return (self._substitution(quoted=False, line=self._line()),)
        parts = self._parts(PLAIN, " \t\r\n;|&()<>", quoted=False, quotes=BOTH)
        if not parts and not may_be_empty:
            what = repr(self._text[self._at]) if self._at < len(self._text) else "the end"
            raise self._error(f"a word is missing before {what}")
        return parts

    def _parts(
        self,
        plain: re.Pattern[str],
        ends: str,
        *,
        quoted: bool,
        quotes: str = "",
        escaped: str | None = None,
    ) -> Word:
        """Read the parts of a text up to one of ``ends``.

        ``quotes`` are the quotation marks that quote there. ``escaped`` are the characters before
        which a backslash vanishes; None means all.
        """
        parts: list[Part] = []
        text = self._text
        while self._at < len(text) and text[self._at] not in ends:
            match = plain.match(text, self._at)
            if match is not None:
                parts.append(Text(match[0], quoted))
                self._at = match.end()
                continue
            parts += self._special(quoted, quotes, escaped)
        return tuple(parts)

    def _special(self, quoted: bool, quotes: str, escaped: str | None) -> list[Part]:
        """Read a backslash, a quotation, or a dollar with what belongs to it."""
        char, following = self._text[self._at], self._text[self._at + 1 : self._at + 2]
        if char == "\\":
            self._at += 2
            if following == "\n":
                return []
            if escaped is None or following in escaped:
                return [Text(following, quoted=True)]
            return [Text(char + following, quoted=True)]
        if char in "$`":
            return [self._dollar(quoted)]
        self._at += 1
        if char not in quotes:
            return [Text(char, quoted)]
        if char == "'":
            return [self._single_quotes()]
        return list(self._double_quotes()) or [Text("", quoted=True)]

    def _single_quotes(self) -> Text:
        start = self._at
        end = self._text.find("'", start)
        if end < 0:
            raise self._error("a quotation has no end")
        self._at = end + 1
        return Text(self._text[start:end], quoted=True)

    def _double_quotes(self) -> Word:
        parts = self._parts(_PLAIN_QUOTED, '"', quoted=True, escaped='$`"\\\n')
        if self._at >= len(self._text):
            raise self._error("a quotation has no end")
        self._at += 1
        return parts

    def _dollar(self, quoted: bool) -> Part:
        text, start = self._text, self._at
        line = self._line()
        if text[start] == "`":
            return self._backquotes(quoted, line)
        if text.startswith("$((", start):
            self._at += 3
            self._nested()
            try:
                expression = self._expression()
            except InvalidInput:
                self._at = start  # a command in two brackets
            else:
                return Arithmetic(text[start : self._at], expression, quoted, line)
            finally:
                self._depth -= 1
        if text.startswith("$(", start):
            return self._substitution(quoted, line)
        if text.startswith("${", start):
            self._nested()
            try:
                return self._braced_use(quoted, line)
            finally:
                self._depth -= 1
        if text.startswith("$'", start) and not quoted:
            return self._escapes()
        if text.startswith('$"', start) and not quoted:
            self._at += 1
            return Text("")
        match = _PARAMETER.match(text, start + 1)
        if match is None:
            self._at += 1
            return Text("$", quoted)
        name = match[0] if not match[0].isdigit() else match[0][0]
        self._at = start + 1 + len(name)
        return Use(f"${name}", name, None, "", (), quoted, line)

    def _expression(self) -> Word:
        """Read an arithmetic expression up to its two closing brackets."""
        parts: list[Part] = []
        depth = 0
        while True:
            parts += self._parts(_PLAIN_EXPRESSION, "()", quoted=True, quotes=BOTH)
            if self._at >= len(self._text):
                raise self._error("'))' is missing")
            if depth == 0 and self._rest_begins("))"):
                self._at += 2
                return tuple(parts)
            bracket = self._text[self._at]
            depth += 1 if bracket == "(" else -1
            if depth < 0:
                raise self._error("'))' is missing")
            parts.append(Text(bracket, quoted=True))
            self._at += 1

    def _escapes(self) -> Text:
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self._text, self._at)
        if match is None:
            raise self._error("a quotation has no end")
        self._at = match.end()
        known = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
        return Text(
            re.sub(
                r"\\(.)", lambda found: known.get(found[1], found[0]), match[1], flags=re.DOTALL
            ),
            quoted=True,
        )

    def _backquotes(self, quoted: bool, line: int) -> Part:
        match = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(self._text, self._at)
        if match is None:
            raise self._error("a command in backquotes has no end")
        self._at = match.end()
        script = re.sub(r"\\([`\\$])", r"\1", match[1])
        return Substitution(match[0], script, quoted, line)

    def _substitution(self, quoted: bool, line: int) -> Part:
        """Read ``$(...)`` up to the bracket that closes it, without parsing what is inside."""
        start = self._at
        match = _BRACKETS.match(self._text, start + 1)
        depth, at = 0, start + 1
        while match is not None:
            at = match.end()
            depth += {"(": 1, ")": -1}.get(match[0], 0)
            if depth == 0:
                self._at = at
                return Substitution(
                    self._text[start:at], self._text[start + 2 : at - 1], quoted, line
                )
            match = _BRACKETS.match(self._text, at)
        raise self._error("'$(' has no ')'")

    def _braced_use(self, quoted: bool, line: int) -> Part:
        text, start = self._text, self._at
        self._at += 2
        operator = ""
        if text[self._at : self._at + 1] in ("#", "!") and text[self._at + 1 : self._at + 2] != "}":
            operator = f"{text[self._at]} "
            self._at += 1
        match = _PARAMETER.match(text, self._at)
        if match is None:
            raise self._error("'${' needs a name")
        self._at = match.end()
        index: Word | None = None
        operand: Word = ()
        if self._rest_begins("["):
            self._at += 1
            index = self._parts(PLAIN_INDEX, "]", quoted=True, quotes=BOTH)
            self._at += 1
        found = _OPERATORS_OF_USES.match(text, self._at)
        if found is not None:
            operator += found[0]
            self._at = found.end()
            operand = self._parts(
                _PLAIN_QUOTED_IN_BRACES if quoted else _PLAIN_IN_BRACES,
                "}",
                quoted=quoted,
                quotes='"' if quoted else BOTH,
                escaped='$`"\\}' if quoted else None,
            )
        if not self._rest_begins("}"):
            raise self._error("'${' has no '}' or has an operator that is not known here")
        self._at += 1
        return Use(text[start : self._at], match[0], index, operator, operand, quoted, line)

    def read_text(self) -> Word:
        """Return the parts of the text as within double quotes."""
        return self._parts(_PLAIN_DOCUMENT, "", quoted=True, escaped="$`\\\n")
