"""Conditions of shell scripts: ``test``, single brackets and double brackets.

An answer is None if only a run of the script decides it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeAlias

from tessera.estimator.stated.shell.nodes import Text, Word
from tessera.estimator.stated.shell.values import (
    is_unknown,
    matches,
    may_be_empty,
    number_of,
    plain,
)

TESTS: Final = frozenset({(Text("["),), (Text("test"),)})
"""The commands that test a condition."""
_NUMBERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_OTHER_BINARY: Final = frozenset({"-nt", "-ot", "-ef"})
_UNARY: Final = re.compile(r"-[a-zA-Z]")
_SIMPLE_EXPRESSION: Final = re.compile(r"\^?(?:[\w.\-:/ |]|\\\W|\[[\w-]+\])*(?:[*+])?\$?")

Answer: TypeAlias = bool | None


class Expander(Protocol):
    """A shell that expands the words of a condition."""

    def text(self, word: Word) -> str:
        """Return the text to which a word expands."""
        ...


def invert(answer: Answer) -> Answer:
    """Return the opposite answer."""
    return None if answer is None else not answer


def both(left: Answer, right: Answer) -> Answer:
    """Return whether two conditions hold."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def either(left: Answer, right: Answer) -> Answer:
    """Return whether one of two conditions holds."""
    return invert(both(invert(left), invert(right)))


def single_brackets(texts: Sequence[str]) -> Answer:
    """Return the answer of ``test`` or ``[``."""
    inner = list(texts[1:])
    if texts[0] == "[":
        if inner[-1:] != ["]"]:
            return False
        inner.pop()
    if not inner:
        return False
    tokens = [(text, text) for text in inner]
    if len(inner) == 1:
        return _is_not_empty(inner[0])
    return _Test(tokens, ("-a", "-o"), single=True).answer()


def double_brackets(words: Iterable[Word], expander: Expander) -> Answer:
    """Return the answer of ``[[``."""
    tokens: list[tuple[str, str]] = []
    for word in words:
        after_match = tokens[-1:] == [("=~", "=~")]
        pattern = (_expression_text if after_match else pattern_text)(word, expander)
        tokens.append((expander.text(word), pattern))
    return _Test(tokens, ("&&", "||"), single=False).answer()


def pattern_text(word: Word, expander: Expander) -> str:
    """Return a word as a pattern, in which what is quoted means itself."""
    texts = []
    for part in word:
        text = plain(expander.text((part,)))
        quoted = part.quoted
        texts.append(re.sub(r"([*?\[\]\\])", r"\\\1", text) if quoted else text)
    return "".join(texts)


def _expression_text(word: Word, expander: Expander) -> str:
    """Return a word as a regular expression, in which what is quoted means itself."""
    texts = [(plain(expander.text((part,))), part.quoted) for part in word]
    return "".join(re.escape(text) if quoted else text for text, quoted in texts)


def _is_not_empty(text: str) -> Answer:
    if is_unknown(text) and may_be_empty(text):
        return None
    return plain(text) != ""


class _Test:
    """The words of a condition that are left to read, with their patterns."""

    def __init__(
        self, tokens: list[tuple[str, str]], connectives: tuple[str, str], *, single: bool
    ) -> None:
        self._tokens = tokens
        self._and, self._or = connectives
        self._single = single
        self._at = 0
        self._depth = 0

    def answer(self) -> Answer:
        answer = self._either()
        return answer if self._at >= len(self._tokens) else None

    def _next(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _either(self) -> Answer:
        answer = self._both()
        while self._next() == self._or and self._at < len(self._tokens):
            self._at += 1
            answer = either(answer, self._both())
        return answer

    def _both(self) -> Answer:
        answer = self._primary()
        while self._next() == self._and and self._at < len(self._tokens):
            self._at += 1
            answer = both(answer, self._primary())
        return answer

    def _primary(self) -> Answer:
        left = len(self._tokens) - self._at
        first = self._next()
        self._depth += 1
        if left == 0 or self._depth > 200:
            self._at += 1
            return None
        second = self._tokens[self._at + 1][0] if left > 1 else ""
        if left >= 3 and self._is_binary(second):
            (subject, _), _, (operand, pattern) = self._tokens[self._at : self._at + 3]
            self._at += 3
            return self._compare(subject, second, operand, pattern)
        if first == "!" and left > 1:
            self._at += 1
            return invert(self._primary())
        if first == "(":
            self._at += 1
            answer = self._either()
            self._at += 1
            return answer
        if left >= 2 and _UNARY.fullmatch(first) and second not in (self._and, self._or):
            self._at += 2
            if first in ("-z", "-n"):
                answer = _is_not_empty(second)
                return invert(answer) if first == "-z" else answer
            return None
        self._at += 1
        return _is_not_empty(first)

    def _is_binary(self, text: str) -> bool:
        return (
            text in _NUMBERS or text in _OTHER_BINARY or text in ("=", "==", "!=", "=~", "<", ">")
        )

    def _compare(self, subject: str, operator: str, operand: str, pattern: str) -> Answer:
        if operator in _OTHER_BINARY or is_unknown(subject) or is_unknown(operand):
            return None
        subject, operand = plain(subject), plain(operand)
        if operator in _NUMBERS:
            left, right = number_of(subject), number_of(operand)
            if left is None or right is None:
                return False if self._single else None
            return _NUMBERS[operator](left, right)
        if operator in ("<", ">"):
            return subject < operand if operator == "<" else subject > operand
        if operator == "=~":
            expression = operand if self._single else pattern
            if not _SIMPLE_EXPRESSION.fullmatch(expression) or len(subject) > 200:
                return None
            return bool(re.search(expression, subject))
        same = subject == operand if self._single else matches(subject, pattern)
        return invert(same) if operator == "!=" else same
