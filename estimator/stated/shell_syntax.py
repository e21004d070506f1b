"""The syntax of shell scripts: commands, conditions, loops and the parts of their words.

It is the part of bash that scripts of training use. Nothing is expanded or executed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from tessera.formulation.errors import InvalidInput

MAX_DEPTH: Final = 30
"""Deepest nesting of commands, conditions and expansions."""


@dataclass(frozen=True, slots=True)
class Text:
    """A literal part of a word."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a variable. ``operator`` is "" or e.g. ":-", and ``operand`` the word after it."""

    source: str
    name: str
    index: Word | None
    operator: str
    operand: Word
    quoted: bool
    line: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The value of an arithmetic expression."""

    source: str
    expression: Word
    quoted: bool
    line: int


@dataclass(frozen=True, slots=True)
class Substitution:
    """The output of a command."""

    source: str
    script: str
    quoted: bool
    line: int


Part: TypeAlias = Text | Use | Arithmetic | Substitution
Word: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of a text, of an element, or of a list of words to a variable."""

    name: str
    index: Word | None
    appended: bool
    value: Word
    elements: tuple[Word, ...] | None


@dataclass(slots=True)
class HereDocument:
    """The text of a here-document, which the parser reads after the line of its command."""

    delimiter: str
    quoted: bool
    tabs_stripped: bool
    text: Word = ()


@dataclass(frozen=True, slots=True)
class Redirection:
    """A redirection to or from a file."""

    operator: str
    target: Word
    document: HereDocument | None = None


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its assignments, words and redirections."""

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]
    redirections: tuple[Redirection, ...]


@dataclass(frozen=True, slots=True)
class DoubleBrackets:
    """A condition in double brackets. Its operators are words."""

    line: int
    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Computation:
    """An arithmetic expression as a command."""

    line: int
    expression: Word


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with the commands after each, and the commands if none holds."""

    line: int
    arms: tuple[tuple[Node, Node], ...]
    otherwise: Node | None


@dataclass(frozen=True, slots=True)
class For:
    """A loop over words. They are None for the script's own arguments."""

    line: int
    name: str
    words: tuple[Word, ...] | None
    body: Node


@dataclass(frozen=True, slots=True)
class While:
    """A loop with a condition, which is None if it is not read."""

    line: int
    condition: Node | None
    until: bool
    body: Node


@dataclass(frozen=True, slots=True)
class Case:
    """A choice by patterns."""

    line: int
    subject: Word
    arms: tuple[tuple[tuple[Word, ...], Node], ...]


@dataclass(frozen=True, slots=True)
class Function:
    """The definition of a function."""

    name: str
    body: Node


@dataclass(frozen=True, slots=True)
class Group:
    """Commands in braces, or in a shell of their own."""

    body: Node
    own_shell: bool


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands that are joined by pipes."""

    parts: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands after each other. Before each there is "&&", "||" or ";"."""

    parts: tuple[tuple[str, Node], ...]


Node: TypeAlias = (
    Simple
    | DoubleBrackets
    | Computation
    | If
    | For
    | While
    | Case
    | Function
    | Group
    | Pipeline
    | Chain
)

_OPERATOR: Final = re.compile(
    r"&&|\|\||;;&|;;|;&|\|&|&>>|&>|<<<|<<-|<<|<>|<&|>>|>&|>\||[;|&()<>\n]"
)
_REDIRECTIONS: Final = frozenset({"&>>", "&>", "<<<", "<<-", "<<", "<>", "<&", ">>", ">&", ">|"})
_PLAIN: Final = re.compile(r"[^\s\\'\"$`;|&()<>]+")
_PLAIN_QUOTED: Final = re.compile(r"[^\\\"$`]+")
_PLAIN_IN_BRACES: Final = re.compile(r"[^\\'\"$`}]+")
_PLAIN_QUOTED_IN_BRACES: Final = re.compile(r"[^\\\"$`}]+")
_BRACKETS: Final = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[()]|[^'"\\()]+|.""", re.DOTALL)
_PLAIN_EXPRESSION: Final = re.compile(r"[^\\'\"$`()]+")
_PLAIN_DOCUMENT: Final = re.compile(r"[^\\$`]+")
_PLAIN_INDEX: Final = re.compile(r"[^\\'\"$`\]]+")
_BLANK: Final = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_COMMENT: Final = re.compile(r"#[^\n]*")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(\[|\+?=)")
_PARAMETER: Final = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]")
_OPERATORS_OF_USES: Final = re.compile(r":[-=?+]|[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@")
_DESCRIPTOR: Final = re.compile(r"(?:[0-9]+|\{[A-Za-z_]\w*\})(?=[<>])")
_DIGITS: Final = re.compile(r"[0-9]+|-")
_BOTH: Final = "'\""
_ENDS: Final = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
_DECLARATIONS: Final = frozenset({"export", "local", "declare", "readonly", "typeset"})


def parse_script(field: str, text: str, line: int = 1, depth: int = 0) -> Chain:
    """Return the commands of a script.

    Raises:
        InvalidInput: the text is not a script, or is nested too deeply; names the line.
    """
    return _Parser(field, text.replace("\r\n", "\n"), line, depth).read_all()


def parse_expression(field: str, text: str, line: int) -> Word:
    """Return the parts of a text as within double quotes."""
    return _Parser(field, text, line, 0).read_text()


class _Parser:
    """A position in a script."""

    def __init__(self, field: str, text: str, line: int, depth: int) -> None:
        self._field = field
        self._text = text
        self._at = 0
        self._first_line = line
        self._counted = (0, line)
        self._depth = depth
        self._documents: list[HereDocument] = []

    def read_all(self) -> Chain:
        chain = self._chain(frozenset())
        if self._at < len(self._text):
            raise self._error(f"{self._text[self._at]!r} is not expected here")
        return chain

    def read_text(self) -> Word:
        return self._parts(_PLAIN_DOCUMENT, "", quoted=True, escaped="$`\\\n")

    # Positions and errors.

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

    def _skip_lines(self) -> None:
        self._skip_blanks()
        while self._rest_begins("\n"):
            self._read_operator()
            self._skip_blanks()

    def _operator(self) -> str:
        """Return the operator that is next after blanks, or ""."""
        self._skip_blanks()
        match = _OPERATOR.match(self._text, self._at)
        return "" if match is None else match[0]

    def _read_operator(self) -> None:
        operator = self._operator()
        self._at += len(operator)
        if operator == "\n" and self._documents:
            self._read_documents()

    def _reserved(self) -> str:
        """Return the reserved word that is next, or "", without reading it."""
        self._skip_blanks()
        match = re.compile(r"(?:\[\[|[{}!]|[a-z]+)(?=[\s;&|()<>]|$)").match(self._text, self._at)
        return "" if match is None else match[0]

    def _read_reserved(self, word: str) -> None:
        self._skip_lines()
        if self._reserved() != word:
            raise self._error(f"{word!r} is missing")
        self._at += len(word)

    # Commands.

    def _chain(self, ends: frozenset[str]) -> Chain:
        """Read commands up to a reserved word in ``ends``, a closing bracket, or the text's end."""
        parts: list[tuple[str, Node]] = []
        before = ";"
        while True:
            self._skip_lines()
            operator = self._operator()
            if self._at >= len(self._text) or operator in (")", ";;", ";&", ";;&"):
                break
            if self._reserved() in _ENDS:
                if self._reserved() in ends:
                    break
                raise self._error(f"{self._reserved()!r} is not expected here")
            pipeline = self._pipeline()
            after = self._operator()
            if after == "&":  # in a shell of its own
                pipeline = Group(pipeline, own_shell=True)
            parts.append((before, pipeline))
            before = after if after in ("&&", "||") else ";"
            if after in ("&&", "||", ";", "&", "\n"):
                self._read_operator()
            elif after in ("(",) or (after == "" and self._at < len(self._text)):
                raise self._error(f"{self._text[self._at]!r} is not expected here")
        return Chain(tuple(parts))

    def _pipeline(self) -> Node:
        negated = False
        while self._reserved() in ("!", "time"):
            negated ^= self._reserved() == "!"
            self._at += len(self._reserved())
        parts = [self._command()]
        while self._operator() in ("|", "|&"):
            self._read_operator()
            self._skip_lines()
            parts.append(self._command())
        return Pipeline(tuple(parts), negated) if negated or len(parts) > 1 else parts[0]

    def _command(self) -> Node:
        self._nested()
        try:
            return self._nested_command()
        finally:
            self._depth -= 1

    def _nested_command(self) -> Node:
        word = self._reserved()
        reader = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "function": self._function,
            "{": self._braces,
            "[[": self._double_brackets,
        }.get(word)
        if reader is None and self._operator() == "(":
            reader = self._computation if self._rest_begins("((") else self._brackets
        if reader is None:
            return self._function_or_simple()
        node = reader()
        while True:  # e.g. done < file
            redirection = self._redirection()
            if redirection is None:
                return node

    def _if(self) -> Node:
        line = self._line()
        arms = []
        word = "if"
        otherwise = None
        while word in ("if", "elif"):
            self._at += len(word)
            condition = self._chain(frozenset({"then"}))
            self._read_reserved("then")
            arms.append((condition, self._chain(frozenset({"elif", "else", "fi"}))))
            word = self._reserved()
        if word == "else":
            self._at += len(word)
            otherwise = self._chain(frozenset({"fi"}))
        self._read_reserved("fi")
        return If(line, tuple(arms), otherwise)

    def _for(self) -> Node:
        line = self._line()
        self._at += len(self._reserved())
        self._skip_blanks()
        if self._rest_begins("(("):
            self._computation()
            return While(line, None, until=False, body=self._loop_body())
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise self._error("'for' needs a name")
        self._at = match.end()
        self._skip_lines()
        words: list[Word] | None = None
        if self._reserved() == "in":
            self._at += 2
            words = []
            while self._operator() == "" and self._at < len(self._text):
                words.append(self._word())
        return For(line, match[0], None if words is None else tuple(words), self._loop_body())

    def _loop_body(self) -> Node:
        if self._operator() == ";":
            self._read_operator()
        self._skip_lines()
        if self._reserved() == "{":
            return self._braces()
        self._read_reserved("do")
        body = self._chain(frozenset({"done"}))
        self._read_reserved("done")
        return body

    def _while(self) -> Node:
        line, word = self._line(), self._reserved()
        self._at += len(word)
        condition = self._chain(frozenset({"do"}))
        return While(line, condition, until=word == "until", body=self._loop_body())

    def _case(self) -> Node:
        line = self._line()
        self._at += len("case")
        self._skip_blanks()
        subject = self._word()
        self._read_reserved("in")
        arms = []
        self._skip_lines()
        while self._reserved() != "esac":
            if self._operator() == "(":
                self._read_operator()
            patterns = [self._pattern()]
            while self._operator() == "|":
                self._read_operator()
                patterns.append(self._pattern())
            if self._operator() != ")":
                raise self._error("a pattern of 'case' needs ')'")
            self._read_operator()
            arms.append((tuple(patterns), self._chain(frozenset({"esac"}))))
            if self._operator() in (";;", ";&", ";;&"):
                self._read_operator()
            self._skip_lines()
            if self._at >= len(self._text):
                raise self._error("'esac' is missing")
        self._at += len("esac")
        return Case(line, subject, tuple(arms))

    def _pattern(self) -> Word:
        self._skip_blanks()
        return self._word()

    def _function(self) -> Node:
        self._at += len("function")
        self._skip_blanks()
        match = re.compile(r"[^\s()]+").match(self._text, self._at)
        if match is None:
            raise self._error("'function' needs a name")
        self._at = match.end()
        if self._operator() == "(":
            self._read_operator()
            self._read_operator()
        return self._function_body(match[0])

    def _function_body(self, name: str) -> Node:
        self._skip_lines()
        return Function(name, self._command())

    def _braces(self) -> Node:
        self._at += 1
        body = self._chain(frozenset({"}"}))
        self._read_reserved("}")
        return Group(body, own_shell=False)

    def _brackets(self) -> Node:
        self._read_operator()
        body = self._chain(frozenset())
        self._close()
        return Group(body, own_shell=True)

    def _close(self) -> None:
        if self._operator() != ")":
            raise self._error("')' is missing")
        self._read_operator()

    def _computation(self) -> Node:
        line = self._line()
        self._at += 2
        return Computation(line, self._expression())

    def _expression(self) -> Word:
        """Read an arithmetic expression up to its two closing brackets."""
        parts: list[Part] = []
        depth = 0
        while True:
            parts += self._parts(_PLAIN_EXPRESSION, "()", quoted=True, quotes=_BOTH)
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

    def _double_brackets(self) -> Node:
        line = self._line()
        self._at += 2
        words: list[Word] = []
        while True:
            self._skip_blanks()
            if self._at >= len(self._text):
                raise self._error("']]' is missing")
            operator = self._operator()
            if operator:
                if operator != "\n":
                    words.append((Text(operator),))
                self._at += len(operator)
                continue
            after_match = words[-1:] == [(Text("=~"),)]
            word = self._regular_expression() if after_match else self._word()
            if word == (Text("]]"),):
                return DoubleBrackets(line, tuple(words))
            words.append(word)

    def _regular_expression(self) -> Word:
        """Read a word of which brackets and bars are parts."""
        parts: list[Part] = []
        while self._at < len(self._text) and not self._text[self._at].isspace():
            parts += self._parts(_PLAIN, " \t\n()|&;<>", quoted=False, quotes=_BOTH)
            if self._at < len(self._text) and self._text[self._at] in "()|&;<>":
                parts.append(Text(self._text[self._at]))
                self._at += 1
        return tuple(parts)

    def _function_or_simple(self) -> Node:
        line = self._line()
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        redirections: list[Redirection] = []
        while True:
            operator = self._operator()
            if operator == "(" and len(words) == 1 and not assignments:
                name = words[0]
                if isinstance(name, tuple) and len(name) == 1 and isinstance(name[0], Text):
                    self._read_operator()
                    self._close()
                    return self._function_body(name[0].text)
            redirection = self._redirection()
            if redirection is not None:
                redirections.append(redirection)
                continue
            if self._at >= len(self._text) or operator not in ("", "<", ">"):
                break
            declares = bool(words) and words[0] in {(Text(name),) for name in _DECLARATIONS}
            assignment = self._assignment() if not words or declares else None
            if assignment is None:
                words.append(self._word())
            elif words:
                words.append(assignment)
            else:
                assignments.append(assignment)
        if not (assignments or words or redirections):
            raise self._error("a command is missing")
        return Simple(line, tuple(assignments), tuple(words), tuple(redirections))

    def _assignment(self) -> Assignment | None:
        """Read an assignment, or nothing if a word is next."""
        match = _ASSIGNED.match(self._text, self._at)
        if match is None:
            return None
        start, index = self._at, None
        self._at = match.end()
        appended = match[2] == "+="
        if match[2] == "[":
            index = self._parts(_PLAIN_INDEX, "]", quoted=True, quotes=_BOTH)
            equals = re.compile(r"\](\+?)=").match(self._text, self._at)
            if equals is None:
                self._at = start
                return None
            appended = bool(equals[1])
            self._at = equals.end()
        if self._rest_begins("("):
            return Assignment(match[1], index, appended, (), self._elements())
        return Assignment(match[1], index, appended, self._word(may_be_empty=True), None)

    def _elements(self) -> tuple[Word, ...]:
        self._at += 1
        elements: list[Word] = []
        while True:
            self._skip_lines()
            if self._at >= len(self._text):
                raise self._error("')' of a list is missing")
            if self._rest_begins(")"):
                self._at += 1
                return tuple(elements)
            elements.append(self._word())

    def _redirection(self) -> Redirection | None:
        self._skip_blanks()
        match = _DESCRIPTOR.match(self._text, self._at)
        start = self._at
        if match is not None:
            self._at = match.end()
        operator = self._operator()
        if (operator not in _REDIRECTIONS and operator not in ("<", ">")) or self._opens_process():
            self._at = start
            return None
        self._at += len(operator)
        if operator in (">&", "<&"):
            digits = _DIGITS.match(self._text, self._at)
            if digits is not None:
                self._at = digits.end()
                return Redirection(operator, (Text(digits[0]),))
        self._skip_blanks()
        target = self._word()
        if operator not in ("<<", "<<-"):
            return Redirection(operator, target)
        delimiter = "".join(part.text for part in target if isinstance(part, Text))
        quoted = any(part.quoted for part in target)
        document = HereDocument(delimiter, quoted, operator == "<<-")
        self._documents.append(document)
        return Redirection(operator, target, document)

    def _opens_process(self) -> bool:
        return self._rest_begins("<(") or self._rest_begins(">(")

    def _read_documents(self) -> None:
        """Read the here-documents of the line that has just ended."""
        for document in self._documents:
            line = self._line()
            lines: list[str] = []
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                text = self._text[self._at : end]
                self._at = min(end + 1, len(self._text))
                if document.tabs_stripped:
                    text = text.lstrip("\t")
                if text == document.delimiter:
                    break
                lines.append(text + "\n")
            whole = "".join(lines)
            if document.quoted:
                document.text = (Text(whole, quoted=True),)
            else:
                document.text = parse_expression(self._field, whole, line)
        self._documents = []

    # Words.

    def _word(self, *, may_be_empty: bool = False) -> Word:
        if self._opens_process():
            return (self._substitution(quoted=False, line=self._line()),)
        parts = self._parts(_PLAIN, " \t\r\n;|&()<>", quoted=False, quotes=_BOTH)
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
            try:
                expression = self._expression()
            except InvalidInput:
                self._at = start  # a command in two brackets
            else:
                return Arithmetic(text[start : self._at], expression, quoted, line)
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
        index, operand = None, ()
        if self._rest_begins("["):
            self._at += 1
            index = self._parts(_PLAIN_INDEX, "]", quoted=True, quotes=_BOTH)
            self._at += 1
        found = _OPERATORS_OF_USES.match(text, self._at)
        if found is not None:
            operator += found[0]
            self._at = found.end()
            operand = self._parts(
                _PLAIN_QUOTED_IN_BRACES if quoted else _PLAIN_IN_BRACES,
                "}",
                quoted=quoted,
                quotes='"' if quoted else _BOTH,
                escaped='$`"\\}' if quoted else None,
            )
        if not self._rest_begins("}"):
            raise self._error("'${' has no '}' or has an operator that is not known here")
        self._at += 1
        return Use(text[start : self._at], match[0], index, operator, operand, quoted, line)
