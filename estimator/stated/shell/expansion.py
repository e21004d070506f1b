"""Expansion of the words of a shell script, whose variables may be unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from tessera.estimator.stated.shell.arithmetic import Calculation
from tessera.estimator.stated.shell.nodes import (
    Arithmetic,
    Assignment,
    Node,
    Simple,
    Substitution,
    Text,
    Use,
    Word,
)
from tessera.estimator.stated.shell.parser import parse_script
from tessera.estimator.stated.shell.values import (
    ASSUMED,
    Unknowns,
    Value,
    edit,
    fields_of,
    is_unknown,
    may_be_empty,
    number_of,
    plain,
)
from tessera.formulation.errors import InvalidInput

_COST_OF_EDIT: Final = 20
_BRACES: Final = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
"""Braces of which bash makes several words, such as ``{1..4}`` and ``{a,b}``."""
MAX_STEPS: Final = 20_000
"""Largest number of commands and words of a script, with those of its variables and loops."""
_FROM_OUTSIDE: Final = re.compile(
    r"(?:SLURM|PBS|LSB|OMPI|PMI|PMIX|SGE|PET|TORCHELASTIC|KUBERNETES|FLUX|COBALT|MLP|ARNOLD|CUDA_VISIBLE)_?\w*"
    r"|WORLD_SIZE|RANK|LOCAL_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT|HOSTNAME|HOME|USER|PWD|OLDPWD|PATH|SHELL|TMPDIR"
    r"|RANDOM|SECONDS|UID|EUID|PPID|LINENO|BASH\w*|FUNCNAME|HOSTFILE|NHOSTS|NNODES_FROM_ENV"
)
"""Variables that a scheduler, a launcher or the system sets."""


@dataclass(slots=True)
class State:
    """The variables and functions of a shell."""

    variables: dict[str, Value] = field(default_factory=dict)
    exported: frozenset[str] = frozenset()
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: list[str] | None = None
    """The arguments of the script or function; None if they are not known."""
    ended: str = ""
    """"exit", "return", "break" or "continue" where the commands that follow are not reached."""

    def copy(self) -> State:
        """Return a copy whose changes do not change this one."""
        return replace(
            self,
            variables=dict(self.variables),
            functions=dict(self.functions),
            arguments=None if self.arguments is None else list(self.arguments),
        )


Items = Iterator[tuple[str, bool, bool]]
"""Pieces of a word: their text, whether it is quoted, and whether it begins a new word."""


class Expansion:
    """A shell's variables, and what it makes of words.

    If ``strict`` is set, conditions assume nothing about variables that nothing sets.
    """

    def __init__(self, field: str, *, strict: bool = False) -> None:
        self._field = field
        self._strict = strict
        self.state = State()
        self.unknowns = Unknowns()
        self.assumed: dict[str, None] = {}
        self._left = MAX_STEPS
        self._testing = False

    def _charge(self, texts: Iterable[str]) -> None:
        """Refuse a script that uses its variables too often or too deeply."""
        for text in texts:
            self._left -= 1 + len(text) // 100
        if self._left < 0:
            raise InvalidInput(self._field, f"has more than {MAX_STEPS:,} words, or very long ones")

    def fields(self, word: Word) -> list[str]:
        """Return the words into which a word expands."""
        for part in word:
            if isinstance(part, Text) and not part.quoted and _BRACES.search(part.text):
                return [self.unknowns.mark(part.text, 0)]  # any number of words
        result: list[str] = []
        current: str | None = None
        for text, quoted, begins in self._items(word):
            if begins and current is not None:
                result.append(current)
                current = None
            if quoted:
                current = (current or "") + text
                continue
            pieces = fields_of(text)
            if text and text[0] in " \t\n" and current is not None:
                result.append(current)
                current = None
            for number, piece in enumerate(pieces):
                if number:
                    result.append(current or "")
                    current = None
                current = (current or "") + piece
            if pieces and text[-1] in " \t\n":
                result.append(current or "")
                current = None
        if current is not None:
            result.append(current)
        self._charge(result)
        return result

    def text(self, word: Word) -> str:
        """Return the text to which a word expands where it is not split."""
        return "".join(f"{' ' * begins}{text}" for text, _, begins in self._items(word))

    def _items(self, word: Word) -> Items:
        for part in word:
            if isinstance(part, Text):
                yield part.text, part.quoted, False
            elif isinstance(part, Use):
                yield from self._use(part)
            elif isinstance(part, Arithmetic):
                value = self._calculate(part.expression)
                yield value or self._mark(part), part.quoted, False
            else:
                yield self._output(part), part.quoted, False

    def _mark(self, part: Use | Arithmetic | Substitution) -> str:
        source = part.source if len(part.source) <= 60 else f"{part.source[:57]}..."
        return self.unknowns.mark(source, part.line)

    def _output(self, part: Substitution) -> str:
        """Return the output of ``echo`` or ``expr``, or a mark."""
        if len(part.script) <= 1000:
            chain = parse_script(self._field, part.script, part.line)
            node = chain.parts[0][1] if len(chain.parts) == 1 else None
            if isinstance(node, Simple) and not node.redirections and not node.assignments:
                fields = [
                    t for w in node.words if not isinstance(w, Assignment) for t in self.fields(w)
                ]
                if fields[:1] == ["echo"] and not any(t.startswith("-") for t in fields[1:2]):
                    return " ".join(fields[1:])
                if (
                    fields[:1] == ["expr"]
                    and len(fields) == 4
                    and fields[2] in ("+", "-", "*", "/", "%")
                ):
                    value = self._calculate((Text(" ".join(fields[1:])),))
                    return value or self._mark(part)
        return self._mark(part)

    def _calculate(self, expression: Word) -> str | None:
        """Return the value of an arithmetic expression, or None if it is unknown."""

        def read(name: str) -> str:
            return "".join(
                text for text, _, _ in self._value(Use(f"${name}", name, None, "", (), True, 0))
            )

        def write(name: str, value: str) -> None:
            self.state.variables[name] = value

        testing, self._testing = self._testing, True
        try:
            return Calculation(self.text(expression), read, write).result()
        except ValueError:
            return None
        finally:
            self._testing = testing

    def _use(self, use: Use) -> Items:
        operator = use.operator
        if operator in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            return self._use_or_operand(use)
        if not operator:
            return self._value(use)
        if operator == "# ":
            return iter([(self._length(use), use.quoted, False)])
        items = list(self._value(replace(use, operator="")))
        if operator == "! ":
            name = "".join(text for text, _, _ in items)
            if use.index is None and re.fullmatch(r"[A-Za-z_]\w*|[0-9]+", plain(name)):
                return self._value(replace(use, name=plain(name), operator=""))
            return iter([(self._mark(use), use.quoted, False)])
        operand = plain(self.text(use.operand))
        of_list = isinstance(self.state.variables.get(use.name), list) and use.index is not None
        whole = use.name in "@*" or (of_list and self.text(use.index or ()) in ("@", "*"))
        if operator == ":" and whole:
            return self._slice(use, operand)
        edited: list[tuple[str, bool, bool]] = []
        for text, quoted, begins in items:
            self._charge([text] * _COST_OF_EDIT)
            known = not is_unknown(text) and not is_unknown(operand)
            value = edit(plain(text), operator, operand) if known else None
            edited.append((self._mark(use) if value is None else value, quoted, begins))
        return iter(edited)

    def _slice(self, use: Use, operand: str) -> Items:
        """Yield the part of a list, or of the arguments, that ``:FIRST`` or ``:FIRST:COUNT`` names."""
        elements = [text for text, _, _ in self._value(replace(use, operator="", quoted=False))]
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?::\s*([0-9]{1,6})\s*)?", operand)
        first = int(match[1]) - (use.name in "@*") if match else -1  # arguments count from 1
        if match is None or first < 0 or any(is_unknown(text) for text in elements):
            yield self._mark(use), use.quoted, False
            return
        part = elements[first : None if match[2] is None else first + int(match[2])]
        is_text = use.quoted and "*" in (use.name, self.text(use.index or ()))
        for number, text in enumerate([" ".join(part)] if is_text else part):
            yield text, use.quoted, number > 0

    def _length(self, use: Use) -> str:
        if use.name in "@*" or use.index is not None:
            items = list(self._value(replace(use, operator="", quoted=True)))
            unknown = any(is_unknown(text) for text, _, _ in items)
            return self._mark(use) if unknown else str(len(items))
        text = "".join(text for text, _, _ in self._value(replace(use, operator="")))
        return self._mark(use) if is_unknown(text) else str(len(plain(text)))

    def _use_or_operand(self, use: Use) -> Items:
        """Yield a value, or the operand, by whether the variable is set."""
        operator = use.operator
        value = self._stored(use)
        unset = value is None
        texts = [] if value is None else [value] if isinstance(value, str) else value
        whole = "".join(texts)
        if not unset and is_unknown(whole) and may_be_empty(whole):
            if operator in (":?", "?"):
                yield from self._value(replace(use, operator=""))
            else:
                yield self._mark(use), use.quoted, False
            return
        if unset and self._is_outside(use.name):
            yield self._mark(use), use.quoted, False
            return
        of_all = use.name == "@" or (use.index is not None and self.text(use.index) == "@")
        if use.quoted and not (of_all and "+" in operator):
            yield "", True, False  # a quoted use is a word, even an empty one
        empty = unset or (not plain(whole) and (operator[0] == ":" or not texts))
        if unset:
            self.assumed.setdefault(use.name)
        if operator in (":?", "?") and empty:
            yield self._mark(use), use.quoted, False
        elif operator in (":+", "+"):
            yield from self._items(use.operand) if not empty else ()
        elif not empty:
            yield from self._value(replace(use, operator=""))
        else:
            items = [
                (
                    text + ASSUMED if unset and text and not is_unknown(text) else text,
                    quoted,
                    begins,
                )
                for text, quoted, begins in self._items(use.operand)
            ]
            if operator in (":=", "="):
                self.state.variables[use.name] = "".join(text for text, _, _ in items)
            yield from items

    def _is_outside(self, name: str) -> bool:
        """Return whether nothing is assumed about a variable that the script does not set."""
        return self._strict or bool(_FROM_OUTSIDE.fullmatch(name)) or name in ("?", "$", "!", "-")

    def _stored(self, use: Use) -> Value | None:
        """Return the value of a variable or of an argument, or None if it is not set."""
        name = use.name
        arguments = self.state.arguments
        if name == "0" or (name == "#" and arguments is None and self._strict):
            return self._mark(use)
        if name == "#":
            if arguments is None:
                self.assumed.setdefault("the script's arguments")
            return str(len(arguments or [])) + ASSUMED * (arguments is None)
        if name.isdigit() or name in "@*":
            if arguments is None:
                return None
            if name in "@*":
                return list(arguments)
            return arguments[int(name) - 1] if int(name) <= len(arguments) else ""
        value = self.state.variables.get(name)
        if value is None or use.index is None:
            return value
        index = self.text(use.index)
        if index in ("@", "*"):
            return [value] if isinstance(value, str) else value
        place = number_of(self._calculate(use.index) or "?")
        elements = [value] if isinstance(value, str) else value
        if place is None or (is_unknown("".join(elements[:1])) and len(elements) == 1):
            return self._mark(use)
        return elements[place] if -len(elements) <= place < len(elements) else ""

    def _value(self, use: Use) -> Items:
        """Yield the value of a variable, of a list, or of the arguments."""
        value = self._stored(use)
        if value is None:
            if self._testing and not self._is_outside(use.name):
                self.assumed.setdefault(use.name)
                value = ""
            else:
                value = self._mark(use)
        index = "" if use.index is None else self.text(use.index)
        if isinstance(value, list) and not (index in ("@", "*") or use.name in "@*"):
            value = value[0] if value else ""
        if isinstance(value, str):
            yield value, use.quoted, False
        elif use.quoted and (index == "*" or use.name == "*"):
            yield " ".join(value), True, False
        else:
            for number, text in enumerate(value):
                yield text, use.quoted, number > 0
