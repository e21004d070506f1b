"""Arithmetic of shells."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from tessera.estimator.stated.shell.values import ASSUMED, is_unknown, plain

_TOKEN: Final = re.compile(
    r"\s*(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,2}#[0-9a-zA-Z]{1,15}|[0-9]{1,18}|[A-Za-z_]\w*"
    r"|\*\*|&&|\|\||<=|>=|==|!=|<<|>>|\+\+|--|[-+*/%&|^]=|[-+*/%<>!~?:()=&|^,])"
)
_LEVELS: Final[tuple[Mapping[str, Callable[[int, int], int]], ...]] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
    },
    {
        "<<": lambda a, b: a << b if 0 <= b < 64 else 0,
        ">>": lambda a, b: a >> b if 0 <= b < 64 else 0,
    },
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {
        "*": lambda a, b: a * b,
        "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
        "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    },
)
"""The operators of arithmetic, those that bind least first."""


class Calculation:
    """An arithmetic expression with the variables that it reads and changes.

    Raises:
        ValueError: the expression is not one, or has an unknown value.
    """

    def __init__(
        self, text: str, read: Callable[[str], str], write: Callable[[str, str], None]
    ) -> None:
        self._assumed = ASSUMED in text
        text = plain(text).strip()
        if is_unknown(text) or len(text) > 500 or len(re.findall(r"[(?=]|\*\*", text)) > 20:
            raise ValueError("it is unknown or too long")
        self._tokens: list[str] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"{text[at:]!r} is not arithmetic")
            self._tokens.append(match[1])
            at = match.end()
        self._tokens.reverse()
        self._read, self._write = read, write

    def result(self) -> str:
        """Return the value of the expression."""
        value = self._comma() if self._tokens else 0
        if self._tokens:
            raise ValueError("it goes on after its end")
        return f"{value}{ASSUMED * self._assumed}"

    def _next(self, *wanted: str) -> str:
        return self._tokens.pop() if self._tokens and self._tokens[-1] in wanted else ""

    def _comma(self) -> int:
        value = self._assigned()
        while self._next(","):
            value = self._assigned()
        return value

    def _assigned(self) -> int:
        tokens = self._tokens
        if len(tokens) >= 2 and re.match(r"[A-Za-z_]", tokens[-1]):
            name, operator = tokens[-1], tokens[-2]
            if operator == "=" or (
                len(operator) == 2 and operator[1] == "=" and operator[0] in "+-*/%"
            ):
                del tokens[-2:]
                value = self._assigned()
                if operator != "=":
                    level = next(level for level in _LEVELS if operator[0] in level)
                    value = self._checked(level[operator[0]], self._variable(name), value)
                self._write(name, str(value))
                return value
        return self._choice()

    def _choice(self) -> int:
        condition = self._level(0)
        if not self._next("?"):
            return condition
        first = self._assigned()
        if not self._next(":"):
            raise ValueError("':' is missing")
        second = self._assigned()
        return first if condition else second

    def _level(self, number: int) -> int:
        if number == len(_LEVELS):
            return self._power()
        value = self._level(number + 1)
        while operator := self._next(*_LEVELS[number]):
            value = self._checked(_LEVELS[number][operator], value, self._level(number + 1))
        return value

    def _checked(self, function: Callable[[int, int], int], left: int, right: int) -> int:
        try:
            value = function(left, right)
        except ZeroDivisionError as error:
            raise ValueError("it divides by 0") from error
        if abs(value) >= 2**63:
            raise ValueError("it is too large")
        return value

    def _power(self) -> int:
        value = self._unary()
        if self._next("**"):
            exponent = self._power()
            if not 0 <= exponent < 64:
                raise ValueError("it is too large")
            return self._checked(lambda a, b: a**b, value, exponent)
        return value

    def _unary(self) -> int:
        operator = self._next("-", "+", "!", "~", "(", "++", "--")
        if operator == "(":
            value = self._comma()
            if not self._next(")"):
                raise ValueError("')' is missing")
            return value
        if operator in ("++", "--"):
            return self._stepped(self._tokens.pop() if self._tokens else "", operator)
        if operator:
            value = self._unary()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[operator]
        token = self._tokens.pop() if self._tokens else ""
        if re.match(r"[A-Za-z_]", token):
            value = self._variable(token)
            if step := self._next("++", "--"):
                self._stepped(token, step)
            return value
        return _literal(token)

    def _stepped(self, name: str, operator: str) -> int:
        if not re.match(r"[A-Za-z_]", name):
            raise ValueError("a name is missing")
        value = self._variable(name) + (1 if operator == "++" else -1)
        self._write(name, str(value))
        return value

    def _variable(self, name: str) -> int:
        text = self._read(name)
        if is_unknown(text):
            raise ValueError(f"{name} is not known")
        self._assumed |= ASSUMED in text
        text = plain(text).strip()
        return _literal(text) if text else 0


def _literal(text: str) -> int:
    try:
        if "#" in text:
            base, _, digits = text.partition("#")
            return int(digits, int(base))
        if text[:2].lower() == "0x":
            return int(text, 16)
        if re.fullmatch(r"-?0[0-9]+", text):
            return int(text, 8)
        if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            return int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a number") from error
    raise ValueError(f"{text!r} is not a number")
