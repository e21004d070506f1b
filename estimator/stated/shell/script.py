"""Reader of the commands that a launch script starts, without a shell.

Simple commands are read one after the other, as bash would run them, and nothing is executed. What
only a run decides is unknown: the environment, the script's arguments, the output of commands, and
each variable that is set after ``&&`` or inside ``if``, a loop, ``case``, a function or brackets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tessera.estimator.stated.shell.commands import Command, CommandReader
from tessera.estimator.stated.shell.variables import (
    ASSIGNMENT,
    CONTROL,
    NAME,
    ShellWord,
    Value,
    Variables,
    plain_text,
)
from tessera.estimator.stated.statement import name_set
from tessera.formulation.errors import InvalidInput

_DEFAULT_THAT_SETS: Final = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[^]]*\])?:?=")
_NUMERIC: Final = name_set("-eq -ne -lt -le -gt -ge")
_SETTERS: Final = name_set("""
    for select export declare typeset local readonly read readarray mapfile getopts let printf unset
    set shift alias
""")
"""Commands of the shell that set variables."""
_NO_STARTERS: Final = name_set("""
    case [ test echo cat tee grep ls cp mv rm sed awk chmod which type kill pkill ps ln tar find
    git pip cd head tail vim mkdir touch wc sort diff true false rsync scp trap pgrep
""")
"""Commands that start nothing, even if a launcher is among their words."""
_LAUNCHERS: Final = frozenset({"torchrun", "deepspeed", "accelerate"})
_LAUNCHER: Final = re.compile(rf"{'|'.join(_LAUNCHERS)}|python[0-9.]*")
_PROGRAM: Final = re.compile(r"\S+\.py")
_MODULES_OF_LAUNCHERS: Final = frozenset({"torch.distributed.launch", "torch.distributed.run"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts a Python program: the launcher's arguments, and the program's."""

    line: int
    launcher: str
    options: tuple[ShellWord, ...]
    program: ShellWord
    words: tuple[ShellWord, ...]


class Script:
    """The commands that a script starts, and what else a reader of plans needs to know of it.

    ``assumed`` are the variables that are taken as not set, and ``others`` are scripts that were not
    read.
    """

    def __init__(self, field: str, functions: set[str]) -> None:
        self._variables = Variables(field)
        self._functions = functions
        self._unread: list[tuple[str, str]] = []
        self._started: list[str] = []
        """The words of the commands that start no program."""
        self.launches: list[Launch] = []
        self.assumed = self._variables.assumed
        self.others: dict[str, None] = {}

    @property
    def unread(self) -> list[tuple[str, ShellWord]]:
        """Return the places of commands that are not followed, with their words."""
        return [(place, self._variables.word(mark)) for place, mark in self._unread]

    @property
    def listed(self) -> list[ShellWord]:
        """Return the words of a text that starts nothing, e.g. a plain list of arguments."""
        is_list = "".join(self._started[:1]).startswith("-")
        words = self._started if is_list else self._variables.listed()
        return [] if self.launches else list(map(self._variables.word, words))

    def follow(self, text: str, commands: Sequence[Command]) -> None:
        """Follow the commands of a text, up to one that ends the shell."""
        for match in _DEFAULT_THAT_SETS.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            source = text[match.start() :].partition("\n")[0]
            self._variables.unsettle([match[1]], line, source)
        for command in commands:
            if self._follow(command) == "exit" and command.is_certain:
                break

    def _follow(self, command: Command) -> str:
        """Follow a command, and return its name."""
        variables, words, line = self._variables, list(command.words), command.line
        if words[0].startswith(("((", "[[")):
            if words[0] != "[[" or _NUMERIC & {*words}:
                variables.note_changes(" ".join(words), line)
            return ""
        settings = []
        while words and (match := ASSIGNMENT.match(words[0])):
            settings.append((match, words.pop(0)))
        fields = [text for word in words for text in variables.fields(word, line)]
        name = plain_text(fields[0]) if fields else ""
        for match, word in settings:
            value = variables.new_value(match, word, line)
            if not fields:
                self._set(match[1], word, value, command)
        source = variables.mark(" ".join(words), line)
        if name in self._functions or name == "eval":
            self._unread.append((f"{name} (line {line})", source))
        elif name in _SETTERS:
            self._declare(words, command)
        elif command.inside and name not in _NO_STARTERS:
            self._unread.append((command.inside, source))
        elif fields and name not in _NO_STARTERS:
            self._start(fields, line)
        is_prefix = name in ("command", "builtin") and fields[1:2] != ["-v"]
        if is_prefix or name in ("eval", "source", ".") or ("\0" in name and "/" not in name):
            self._forget(command)
        return name

    def _set(self, name: str, source: str, value: Value, command: Command) -> None:
        """Set a variable, which is unknown if a run decides whether it is set."""
        self._variables.set(name, source, value)
        if not command.is_certain:
            self._variables.unsettle([name], command.line)

    def _forget(self, command: Command) -> None:
        for_ever = command.inside.startswith("the function")
        self._variables.forget(command.line, for_ever=for_ever)

    def _declare(self, words: Sequence[str], command: Command) -> None:
        """Follow a command that sets the variables that it names, or the script's arguments."""
        name, operands, line = words[0], words[1:], command.line
        option = "".join(operands[:1])
        if name == "shift" or (name == "set" and ("--" in operands or option[:1] not in "-+")):
            self._variables.unsettle("@*123456789", line, " ".join(words))
        if name in ("set", "shift") or (name == "printf" and option != "-v"):
            return
        values = []
        for word in operands[: 1 if name in ("for", "select") else None]:
            match = ASSIGNMENT.match(word)
            head = word if name == "let" else word.partition("=")[0]
            if name == "export" and match and match[2] == "":
                values.append((match[1], word, self._variables.new_value(match, word, line)))
            elif "$" in head or "`" in head or name not in _SETTERS:
                self._forget(command)
            elif name == "alias":
                self._functions |= {*NAME.findall(head)}
            elif name in ("local", "declare", "typeset") and re.match("-[a-zA-Z]*n", word):
                self._variables.forget(line, for_ever=True)
            elif name != "export" or not NAME.fullmatch(word):
                self._variables.unsettle(NAME.findall(head), line, " ".join(words))
        for variable, word, value in values:
            self._set(variable, word, value, command)

    def _start(self, fields: Sequence[str], line: int) -> None:
        """Note the program that a command starts."""
        names = [plain_text(text).rpartition("/")[2] for text in fields]
        start = next((at for at, name in enumerate(names) if _LAUNCHER.fullmatch(name)), -1)
        launcher = names[start] if start >= 0 else ""
        programs = [at for at, name in enumerate(names) if at > start and _PROGRAM.fullmatch(name)]
        module = names.index("-m", start) + 1 if "-m" in names[start:] else len(names)
        if launcher.startswith("python") and module < min([*programs, len(names)]):
            is_launcher = names[module] in _MODULES_OF_LAUNCHERS
            launcher, programs = ("torchrun", programs) if is_launcher else (launcher, [module])
        if launcher in _LAUNCHERS:
            programs = programs or [start]
        word = self._variables.word
        if programs and (launcher or "\0" in names[0] or programs[0] == 0):
            program, words = programs[0], tuple(map(word, fields))
            launch = Launch(
                line=line,
                launcher=launcher,
                options=words[start + 1 : program if program > start else None],
                program=words[program],
                words=words[program + 1 :],
            )
            self.launches.append(launch)
            return
        self._started += fields
        for text in fields:
            if " " in text:
                place = f"the text of a command (line {line})"
                self._unread.append((place, self._variables.mark(text, line)))
            elif text.endswith(".sh"):
                self.others[f"{word(text)} (line {line})"] = None


def read_script(field: str, text: str) -> Script:
    """Return the commands that a script, a command line or a plain list of arguments starts.

    Raises:
        InvalidInput: the text is not a script, or does too much.
    """
    if CONTROL.search(text):
        raise InvalidInput(field, "has a control character; remove it")
    reader = CommandReader(text.replace("\r\n", "\n"))
    try:
        reader.read()
        script = Script(field, reader.functions)
        script.follow(text, reader.commands)
    except ValueError as error:
        problem = f"is not a script that can be read: {error} (line {reader.line})"
        raise InvalidInput(field, problem) from error
    return script
