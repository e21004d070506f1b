"""Parser of shell scripts. Nothing is expanded or executed."""

from __future__ import annotations

import re
from typing import Final

from tessera.estimator.stated.shell.lexer import BOTH, PLAIN, PLAIN_INDEX, WordReader
from tessera.estimator.stated.shell.nodes import (
    Assignment,
    Case,
    Chain,
    Computation,
    DoubleBrackets,
    For,
    Function,
    Group,
    HereDocument,
    If,
    Node,
    Part,
    Pipeline,
    Redirection,
    Simple,
    Text,
    While,
    Word,
)

_REDIRECTIONS: Final = frozenset({"&>>", "&>", "<<<", "<<-", "<<", "<>", "<&", ">>", ">&", ">|"})
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(\[|\+?=)")
_DESCRIPTOR: Final = re.compile(r"(?:[0-9]+|\{[A-Za-z_]\w*\})(?=[<>])")
_DIGITS: Final = re.compile(r"[0-9]+|-")
_ENDS: Final = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
_DECLARATIONS: Final = frozenset({"export", "local", "declare", "readonly", "typeset"})


def parse_script(field: str, text: str, line: int = 1, depth: int = 0) -> Chain:
    """Return the commands of a script.

    Raises:
        InvalidInput: the text is not a script, or is nested too deeply; names the line.
    """
    return _Parser(field, text.replace("\r\n", "\n"), line, depth).read_all()


class _Parser(WordReader):
    """A position in a script, with the here-documents that begin after the current line."""

    def __init__(self, field: str, text: str, line: int, depth: int) -> None:
        super().__init__(field, text, line, depth)
        self._documents: list[HereDocument] = []

    def read_all(self) -> Chain:
        chain = self._chain(frozenset())
        if self._at < len(self._text):
            raise self._error(f"{self._text[self._at]!r} is not expected here")
        return chain

    def _skip_lines(self) -> None:
        self._skip_blanks()
        while self._rest_begins("\n"):
            self._read_operator()
            self._skip_blanks()

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
            parts += self._parts(PLAIN, " \t\n()|&;<>", quoted=False, quotes=BOTH)
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
            index = self._parts(PLAIN_INDEX, "]", quoted=True, quotes=BOTH)
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
                document.text = WordReader(self._field, whole, line).read_text()
        self._documents = []
