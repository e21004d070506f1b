"""Reader of the commands that a shell script would start, without a shell.

A script is followed as bash would run it: its assignments, lists, functions, conditions and loops.
Nothing is executed. What only a run decides is unknown: the output of programs, the environment
and the script's own arguments. If a condition is unknown, all of its branches are followed, and
what they leave different is unknown, too. Conditions take variables that nothing sets as not set,
except for those that a scheduler sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from tessera.estimator.stated.shell import conditions
from tessera.estimator.stated.shell.commands import Commands, Launch
from tessera.estimator.stated.shell.expansion import State
from tessera.estimator.stated.shell.nodes import (
    Assignment,
    Case,
    Chain,
    Computation,
    For,
    Function,
    Group,
    If,
    Node,
    Pipeline,
    Simple,
    Substitution,
    Text,
    Use,
    While,
    Word,
)
from tessera.estimator.stated.shell.parser import parse_script
from tessera.estimator.stated.shell.values import (
    ShellWord,
    fields_of,
    is_unknown,
    matches,
    number_of,
    plain,
)
from tessera.formulation.errors import InvalidInput

MAX_TURNS: Final = 5
"""Largest number of turns in which a loop of unknown length is followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The commands that a script starts, and what else a reader of plans needs to know of it.

    ``listed`` are the words of a text that starts nothing, e.g. a plain list of arguments.
    ``files`` are the texts that the script writes to files. ``assumed`` are the variables that are
    taken as not set. ``others`` are scripts that were not read.
    """

    launches: tuple[Launch, ...]
    listed: tuple[ShellWord, ...]
    files: dict[str, str]
    assumed: tuple[str, ...]
    others: tuple[str, ...]


def read_script(field: str, text: str) -> Script:
    """Return the commands that a script, a command line or a plain list of arguments starts.

    Raises:
        InvalidInput: the text is not a script, or does too much.
    """
    if re.search("[\0\1]", text):
        raise InvalidInput(field, "has a control character; remove it")
    script = parse_script(field, text)
    run = _Run(field)
    run.run(script)
    if not run.launches and run.state.ended and run.assumed:
        # The script only explains its arguments, or stops, if they are not given.
        run = _Run(field, strict=True)
        run.run(script)
    return run.script()


class _Run(Commands):
    """A script that is followed through its conditions and loops."""

    def script(self) -> Script:
        """Return what the script starts."""
        listed: list[str] = []
        if not self.launches:
            if self._commands and self._commands[0][0].startswith("-"):
                listed = [word for words in self._commands for word in words]
            else:
                lists = (fields_of(value) for value in self.state.variables.values())
                listed = [
                    word
                    for words in lists
                    if words[:1] and words[0].startswith("--")
                    for word in words
                ]
        word = self.unknowns.word
        return Script(
            launches=tuple(self.launches),
            listed=tuple(word(text) for text in listed),
            files={str(word(name)): str(word(text)) for name, text in self._files.items()},
            assumed=tuple(self.assumed),
            others=tuple(self._others),
        )

    def run(self, node: Node) -> bool | None:
        self._charge([""])
        if isinstance(node, Chain):
            return self._chain(node)
        if isinstance(node, Simple):
            return self._simple(node)
        if isinstance(node, Pipeline):
            return self._pipeline(node)
        if isinstance(node, Group):
            return self._in_own_shell(node.body) if node.own_shell else self.run(node.body)
        if isinstance(node, If):
            return self._if(node)
        if isinstance(node, For):
            return self._for(node)
        if isinstance(node, While):
            return self._while(node)
        if isinstance(node, Case):
            return self._case(node)
        if isinstance(node, Function):
            self.state.functions[node.name] = node.body
            return True
        if isinstance(node, Computation):
            value = number_of(self._calculate(node.expression) or "?")
            return None if value is None else value != 0
        return self._test(lambda: conditions.double_brackets(node.words, self))

    def _chain(self, node: Chain) -> bool | None:
        status: bool | None = True
        for before, part in node.parts:
            if self.state.ended:
                return status
            if before == ";" or status is (before == "&&"):
                status = self.run(part)
            elif status is None:
                status = self._perhaps(part, part_line(part))
        return status

    def _perhaps(self, node: Node, line: int) -> bool | None:
        """Follow commands that are reached or not."""
        self._branches([lambda: self.run(node), lambda: None], line)
        return None

    def _branches(self, runs: Sequence[Callable[[], object]], line: int) -> None:
        """Follow several branches of which one is taken, and join what they leave."""
        before = self.state
        after = []
        for run in runs:
            self.state = before.copy()
            run()
            after.append(self.state)
        self.state = self._joined(after, line)

    def _in_own_shell(self, node: Node) -> bool | None:
        before, mark = self.state, len(self._aside)
        self.state = before.copy()
        status = self.run(node)
        self.state = before
        del self._aside[mark:]
        return status

    def _pipeline(self, node: Pipeline) -> bool | None:
        status: bool | None = True
        for part in node.parts:
            status = self.run(part) if len(node.parts) == 1 else self._in_own_shell(part)
        if node.negated:
            return None if status is None else not status
        return status

    def _if(self, node: If) -> bool | None:
        after: list[State] = []
        for condition, body in node.arms:
            holds = self.run(condition)
            if self.state.ended or holds is False:
                continue
            if holds:
                self.run(body)
                break
            before = self.state
            self.state = before.copy()
            self.run(body)
            after.append(self.state)
            self.state = before
        else:
            if node.otherwise is not None and not self.state.ended:
                self.run(node.otherwise)
        if after:
            self.state = self._joined([*after, self.state], node.line)
        return None if after else True

    def _for(self, node: For) -> bool | None:
        if node.words is None:
            words = self.fields((Use("$@", "@", None, "", (), True, node.line),))
        else:
            words = [text for word in node.words for text in self.fields(word)]
        if any(is_unknown(word) for word in words):
            turn = self.unknowns.mark(f"${node.name}", node.line)

            def take_a_turn() -> bool | None:
                self.state.variables[node.name] = turn
                return self.run(node.body)

            self._repeat(take_a_turn, node.line)
            return None
        mark = len(self._aside)
        for word in words:
            self.state.variables[node.name] = word
            self.run(node.body)
            self._end_scope(mark, "continue", node.line)
            if self.state.ended:
                break
        self._end_scope(mark, "break", node.line)
        return None

    def _repeat(self, take_a_turn: Callable[[], object], line: int) -> None:
        """Follow a loop of unknown length, until further turns make no more variables unknown."""
        launches, mark, unknown = len(self.launches), len(self._aside), -1
        for _ in range(MAX_TURNS):
            del self.launches[launches:]
            before = self.state
            self.state = before.copy()
            take_a_turn()
            self._end_scope(mark, "continue", line)
            self._end_scope(mark, "break", line)
            self.state = self._joined([before, self.state], line)
            values = self.state.variables.values()
            count = sum(is_unknown("".join(value)) for value in values)
            if count == unknown:
                return
            unknown = count

    def _while(self, node: While) -> bool | None:
        mark = len(self._aside)
        while True:
            self._charge([""])
            before = self.state.copy()
            holds = None if node.condition is None else self.run(node.condition)
            if holds is None:
                self._repeat(lambda: self._turn_of(node), node.line)
            if holds is None or holds is node.until or self.state.ended:
                break
            self.run(node.body)
            self._end_scope(mark, "continue", node.line)
            if self.state.ended or self.state == before:  # else it would go on for ever
                break
        self._end_scope(mark, "break", node.line)
        return None

    def _turn_of(self, node: While) -> None:
        self.run(node.body)
        if node.condition is not None and not self.state.ended:
            self.run(node.condition)

    def _case(self, node: Case) -> bool | None:
        self._testing = True
        subject = self.text(node.subject)
        self._testing = False
        if is_unknown(subject):
            bodies = [body for _, body in node.arms]
            if not any((Text("*"),) in patterns for patterns, _ in node.arms):
                bodies.append(Chain(()))
            self._branches([partial(self.run, body) for body in bodies], node.line)
            return None
        for patterns, body in node.arms:
            self._charge([""] * len(patterns))
            answers = [matches(plain(subject), conditions.pattern_text(p, self)) for p in patterns]
            if any(answers):
                return self.run(body)
            if None in answers:
                return self._perhaps(body, node.line)
        return True

    def _test(self, answer: Callable[[], bool | None]) -> bool | None:
        self._testing = True
        try:
            return answer()
        finally:
            self._testing = False

    def _simple(self, node: Simple) -> bool | None:
        words = node.words
        first = words[0] if words else None
        if isinstance(first, tuple) and first in conditions.TESTS:
            texts = self._test_fields(words)
            return self._test(lambda: conditions.single_brackets(texts))
        fields: list[str | Assignment] = []
        for word in words:
            fields += [word] if isinstance(word, Assignment) else self.fields(word)
        self._write_files(node, [text for text in fields if isinstance(text, str)])
        if not fields:
            for assignment in node.assignments:
                self._assign(assignment)
            substitutes = any(
                isinstance(part, Substitution) for a in node.assignments for part in a.value
            )
            return None if substitutes else True
        before = {a.name: self.state.variables.get(a.name) for a in node.assignments}
        for assignment in node.assignments:
            self._assign(assignment)
        exported = self.state.exported
        self.state.exported |= frozenset(before)
        status = self.command(fields, node)
        self.state.exported = self.state.exported - frozenset(before) | (
            exported & frozenset(before)
        )
        self._set_again(before)
        return status

    def _test_fields(self, words: Iterable[Word | Assignment]) -> list[str]:
        self._testing = True
        texts = [t for word in words if isinstance(word, tuple) for t in self.fields(word)]
        self._testing = False
        return texts


def part_line(node: Node) -> int:
    """Return the line of a command."""
    while isinstance(node, Chain | Pipeline):
        first = node.parts[0]
        node = first[1] if isinstance(first, tuple) else first
    while isinstance(node, Group):
        return part_line(node.body)
    return 0 if isinstance(node, Function) else node.line
