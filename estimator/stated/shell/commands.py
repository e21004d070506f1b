"""Simple commands of shell scripts: those of the shell, and those that start programs."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tessera.estimator.stated.shell.expansion import Expansion, State
from tessera.estimator.stated.shell.nodes import Assignment, Node, Simple, Text, Word
from tessera.estimator.stated.shell.parser import parse_script
from tessera.estimator.stated.shell.values import (
    ShellWord,
    Value,
    is_unknown,
    may_be_empty,
    number_of,
    plain,
)
from tessera.estimator.stated.statement import name_set
from tessera.formulation.errors import InvalidInput

MAX_CALLS: Final = 5
"""Deepest nesting of functions and of scripts in scripts."""

_SHELLS: Final = frozenset({"bash", "sh", "zsh", "dash"})
_TRUE_COMMANDS: Final = name_set("""
    cd pushd popd echo printf trap mkdir ulimit module sleep wait date alias shopt umask
""")
_NO_STARTERS: Final = name_set("""
    echo printf cat tee grep ls cp mv rm sed awk chmod which type kill pkill ps ln tar find git
    pip cd test head tail vim mkdir touch wc sort diff true false rsync scp read trap source
    export pgrep
""")
"""Commands that start nothing, even if a launcher is among their words."""
_WRAPPERS: Final = frozenset({"exec", "command", "builtin", "nohup", "time"})
_REMOTE: Final = frozenset(
    {"ssh", "pdsh", "tmux", "screen", "clush", "script", "su", "docker", "sbatch"}
)
_LAUNCHER: Final = re.compile(r"(?:.*/)?(?:torchrun|deepspeed|accelerate|python[0-9.]*)")
_PROGRAM: Final = re.compile(r".+\.py")
_MODULES_OF_LAUNCHERS: Final = frozenset({"torch.distributed.launch", "torch.distributed.run"})
_FLAGS_OF_LAUNCHERS: Final = name_set("""
    --standalone --use-env --use_env --no-python --no_python --run-path --module -m --force_multi
    --no_local_rank --no_ssh --use_deepspeed --use_fsdp --multi_gpu -u --enable_each_rank_log
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts a Python program: the launcher's arguments, and the program's."""

    line: int
    launcher: str
    options: tuple[ShellWord, ...]
    program: ShellWord
    words: tuple[ShellWord, ...]


_Builtin: TypeAlias = Callable[[list[str], Simple], bool | None]


def _has_index(word: Word) -> bool:
    """Return whether an element of a list states its own index, as ``[7B]=2`` does."""
    texts = "".join(part.text for part in word if isinstance(part, Text) and not part.quoted)
    return texts.startswith("[") and "]=" in texts


class Commands(Expansion):
    """A shell that notes the programs that it would start."""

    def __init__(self, field: str, *, strict: bool = False) -> None:
        super().__init__(field, strict=strict)
        self.launches: list[Launch] = []
        self._commands: list[list[str]] = []
        self._files: dict[str, str] = {}
        self._others: dict[str, None] = {}
        self._calls = 0
        self._locals: list[dict[str, Value | None]] = []
        self._aside: list[State] = []
        """What branches left that ended a turn of a loop, the loop, or a function."""

    @abstractmethod
    def run(self, node: Node) -> bool | None:
        """Follow commands. Return whether they succeed, or None if that is unknown."""

    def command(self, fields: Sequence[str | Assignment], node: Simple) -> bool | None:
        """Follow a command with its expanded words. Return whether it succeeds."""
        first = fields[0]
        if not isinstance(first, str):
            return True
        if first in ("export", "declare", "local", "readonly", "typeset"):
            self._declare(first, fields[1:])
            return True
        texts = [text for text in fields if isinstance(text, str)]
        while texts and plain(texts[0]) in _WRAPPERS:
            texts = texts[1:]
            while texts and texts[0].startswith("-"):
                texts = texts[1:]
        if not texts:
            return True
        name, rest = plain(texts[0]), texts[1:]
        if name in self.state.functions:
            return self._call(self.state.functions[name], rest)
        builtin: _Builtin | None = getattr(self, f"_do_{name}", None) if name.isalpha() else None
        if name == ".":
            builtin = self._do_source
        if builtin is not None:
            return builtin(rest, node)
        if name in (":", "true", "false"):
            return name != "false"
        return self._external(texts, node)

    def _write_files(self, node: Simple, fields: Sequence[str]) -> None:
        """Note the text of a here-document, or of ``echo``, that is written to a file."""
        document = next((r.document for r in node.redirections if r.document is not None), None)
        target = next(
            (r.target for r in node.redirections if r.operator in (">", ">|", ">>")), None
        )
        if document is not None and fields[:1] in (["bash"], ["sh"], ["sbatch"]):
            self._child(self.text(document.text), [], node.line)
        name = None if target is None else self.text(target)
        if document is not None and name is None and fields[:1] == ["tee"] and len(fields) > 1:
            name = fields[-1]
        if name is None:
            return
        if document is not None:
            self._files[plain(name)] = self.text(document.text)
        elif fields[:1] == ["echo"]:
            self._files[plain(name)] = " ".join(fields[1:])
        else:
            self._files.pop(plain(name), None)

    def _joined(self, states: Sequence[State], line: int) -> State:
        """Return what several branches leave. Those that end the script are not followed."""
        live = [state for state in states if not state.ended] or states[:1]
        if not live[0].ended:
            self._aside += [s for s in states if s.ended not in ("", "exit")]
        joined = live[0].copy()
        for state in live[1:]:
            joined.functions |= state.functions
            joined.exported |= state.exported
            if state.arguments != joined.arguments:
                joined.arguments = None
        names = dict.fromkeys(name for state in live for name in state.variables)
        for name in names:
            values = [state.variables.get(name, "") for state in live]
            if any(value != values[0] for value in values) or any(
                name not in state.variables for state in live
            ):
                self._charge([""])
                same = all(value == values[0] for value in values)
                choices = tuple(values)
                mark = self.unknowns.mark(f"${name}", line, choices)
                joined.variables[name] = values[0] if same else mark
        return joined

    def _end_scope(self, mark: int, ended: str, line: int) -> None:
        """End a turn of a loop, a loop or a function, also for branches that ended it earlier."""
        states = [state for state in self._aside[mark:] if state.ended == ended]
        self._aside[mark:] = [state for state in self._aside[mark:] if state.ended != ended]
        for state in (self.state, *states):
            if state.ended == ended:
                state.ended = ""
        if states:
            self.state = self._joined([self.state, *states], line)

    def _declare(self, command: str, words: Sequence[str | Assignment]) -> None:
        names: list[str] = []
        maps = False
        is_local = command in ("local", "declare", "typeset") and bool(self._locals)
        for word in words:
            if isinstance(word, Assignment):
                self._keep_for_caller(word.name, is_local)
                self._assign(word)
                names.append(word.name)
            elif word.startswith("-"):
                maps |= "A" in word
            elif re.fullmatch(r"[A-Za-z_]\w*", word):
                self._keep_for_caller(word, is_local)
                names.append(word)
                if command in ("local", "declare", "typeset"):
                    self.state.variables.setdefault(word, "")
        if command == "export" or "-x" in words:
            self.state.exported |= frozenset(names)
        if maps:
            for name in names:
                self.state.variables[name] = self.unknowns.mark(f"${name}", 0)

    def _keep_for_caller(self, name: str, is_local: bool) -> None:
        """Note what a function's caller has in a variable that the function makes its own."""
        if is_local and name not in self._locals[-1]:
            self._locals[-1][name] = self.state.variables.pop(name, None)

    def _set_again(self, values: Mapping[str, Value | None]) -> None:
        """Give variables the values that they had before. None means not set."""
        for name, value in values.items():
            if value is None:
                self.state.variables.pop(name, None)
            else:
                self.state.variables[name] = value

    def _assign(self, assignment: Assignment) -> None:
        variables, name = self.state.variables, assignment.name
        old = variables.get(name, [] if assignment.elements is not None else "")
        if assignment.elements is not None:
            if any(map(_has_index, assignment.elements)):
                variables[name] = self.unknowns.mark(f"${name}", 0)
                return
            added = [text for word in assignment.elements for text in self.fields(word)]
            kept = [old] if isinstance(old, str) and old else list(old)
            variables[name] = kept + added if assignment.appended else added
            return
        value = self.text(assignment.value)
        self._charge([value])
        if assignment.index is not None:
            place = number_of(self._calculate(assignment.index) or "?")
            elements = [old] if isinstance(old, str) and old else list(old)
            in_map = isinstance(old, str) and is_unknown(old)  # or in a list that is not known
            if place is None or in_map or not -len(elements) <= place <= len(elements):
                variables[name] = self.unknowns.mark(f"${name}", 0)
                return
            if place == len(elements):
                elements.append("")
            elements[place] = elements[place] + value if assignment.appended else value
            variables[name] = elements
        elif isinstance(old, list):
            first = (old[0] if old and assignment.appended else "") + value
            variables[name] = [first, *old[1:]]
        else:
            variables[name] = old + value if assignment.appended else value

    def _call(self, body: Node, arguments: list[str]) -> bool | None:
        if self._calls >= MAX_CALLS:
            raise InvalidInput(
                self._field, f"has functions that call each other {MAX_CALLS} times deep"
            )
        before = self.state.arguments
        self._calls += 1
        self._locals.append({})
        self.state.arguments = arguments
        mark = len(self._aside)
        status = self.run(body)
        self._end_scope(mark, "return", 0)
        self._calls -= 1
        self._set_again(self._locals.pop())
        self.state.arguments = before
        return status

    def _child(self, text: str, arguments: list[str], line: int) -> bool | None:
        """Follow a script that another shell runs with the exported variables."""
        before = self.state
        variables = {n: v if n in before.exported else "" for n, v in before.variables.items()}
        self.state = State(variables, before.exported, arguments=arguments)
        mark = len(self._aside)
        status = self._nested_script(text, line)
        self.state = before
        del self._aside[mark:]
        return status

    def _nested_script(self, text: str, line: int) -> bool | None:
        if self._calls >= MAX_CALLS:
            raise InvalidInput(self._field, f"has scripts in scripts, {MAX_CALLS} levels deep")
        self._charge([text])
        self._calls += 1
        status = self.run(parse_script(self._field, text, line))
        self._calls -= 1
        return status

    def _do_eval(self, words: list[str], node: Simple) -> bool | None:
        return self._nested_script(" ".join(words), node.line)

    def _do_source(self, words: list[str], node: Simple) -> bool | None:
        name = plain(words[0]) if words else ""
        if name in self._files:
            return self._nested_script(self._files[name], node.line)
        self._others[f"{self.unknowns.word(name)} (line {node.line})"] = None
        return None

    def _do_unset(self, words: list[str], node: Simple) -> bool:
        for word in words:
            if not word.startswith("-"):
                name, bracket, _ = plain(word).partition("[")
                unknown = self.unknowns.mark(f"${name}", node.line) if bracket else ""
                self.state.variables[name] = unknown
        return True

    def _do_shift(self, words: list[str], node: Simple) -> bool:
        count = number_of(words[0]) if words else 1
        arguments = self.state.arguments
        if arguments is not None:
            self.state.arguments = arguments[count:] if count is not None else None
        return True

    def _do_set(self, words: list[str], node: Simple) -> bool:
        if "--" in words:
            self.state.arguments = words[words.index("--") + 1 :]
        return True

    def _do_exit(self, words: list[str], node: Simple) -> bool:
        self.state.ended = "exit"
        return True

    def _do_return(self, words: list[str], node: Simple) -> bool | None:
        self.state.ended = "return"
        status = number_of(words[0]) if words else None
        return None if status is None else status == 0

    def _do_break(self, words: list[str], node: Simple) -> bool:
        self.state.ended = "break"
        return True

    def _do_continue(self, words: list[str], node: Simple) -> bool:
        self.state.ended = "continue"
        return True

    def _do_let(self, words: list[str], node: Simple) -> bool | None:
        value: int | None = None
        for word in words:
            value = number_of(self._calculate((Text(word),)) or "?")
        return None if value is None else value != 0

    def _do_read(self, words: list[str], node: Simple) -> None:
        for word in words:
            if re.fullmatch(r"[A-Za-z_]\w*", word):
                self.state.variables[word] = self.unknowns.mark(f"${word}", node.line)

    _do_mapfile = _do_readarray = _do_getopts = _do_read

    def _do_printf(self, words: list[str], node: Simple) -> bool:
        if words[:1] == ["-v"]:
            self._do_read(words[1:2], node)
        return True

    def _external(self, texts: list[str], node: Simple) -> bool | None:
        self._charge(texts)
        self._commands.append(texts)
        names = [plain(text).rpartition("/")[2] for text in texts]
        if names[0] in _NO_STARTERS:
            return True if names[0] in _TRUE_COMMANDS else None
        for at, name in enumerate(names):
            if name in _SHELLS and self._start_shell(texts[at + 1 :], node):
                return None
            if _LAUNCHER.fullmatch(plain(texts[at])) and self._start_program(texts[at:], node):
                return None
        if names[0] in _REMOTE:
            for text in texts[1:]:
                script = text.removeprefix("--wrap=")
                if len(script.split()) > 1 and (".py" in script or ".sh" in script):
                    self._child(script, [], node.line)
                    return None
        if may_be_empty(texts[0]) or _PROGRAM.fullmatch(plain(texts[0])):
            self._start_program(["", *texts], node)
        elif names[0] in ("srun", "sbatch", *self._files) or names[0].endswith(".sh"):
            self._start_file(texts, node)
        return True if names[0] in _TRUE_COMMANDS else None

    def _start_file(self, texts: list[str], node: Simple) -> None:
        for at, text in enumerate(texts):
            if plain(text) in self._files:
                self._child(self._files[plain(text)], texts[at + 1 :], node.line)
                return
            if plain(text).endswith(".sh"):
                self._others[f"{self.unknowns.word(text)} (line {node.line})"] = None
                return

    def _start_shell(self, texts: list[str], node: Simple) -> bool:
        """Follow ``-c SCRIPT`` or a file that this script wrote. Return whether there is one."""
        for at, text in enumerate(texts):
            if re.fullmatch(r"-[a-z]*c", text) and at + 1 < len(texts):
                self._child(texts[at + 1], texts[at + 2 :] and texts[at + 3 :], node.line)
                return True
            if not text.startswith("-"):
                self._start_file(texts[at : at + 1], node)
                return True
        return False

    def _start_program(self, texts: list[str], node: Simple) -> bool:
        """Note a command that starts a Python program. Return whether it does."""
        launcher = plain(texts[0]).rpartition("/")[2]
        start = 1
        if launcher.startswith("python") and "-m" in texts:
            at = texts.index("-m") + 1
            module = plain(texts[at]) if at < len(texts) else ""
            if module in _MODULES_OF_LAUNCHERS:
                launcher, start = "torchrun", at + 1
            elif module and not any(_PROGRAM.fullmatch(plain(text)) for text in texts[:at]):
                self._note(node, launcher, texts[1:], at - 1)
                return True
        start += launcher == "accelerate"
        places = range(start, len(texts))
        program = next((i for i in places if _PROGRAM.fullmatch(plain(texts[i]))), None)
        if program is None and launcher in ("torchrun", "deepspeed", "accelerate"):
            program = self._first_operand(texts, start)
        if program is None:
            return False
        self._note(node, launcher, texts[1:], program - 1)
        return True

    def _first_operand(self, texts: list[str], at: int) -> int | None:
        """Return the place of a launcher's first word that is no option and no value of one."""
        while at < len(texts) and texts[at].startswith("-"):
            alone = "=" in texts[at] or texts[at] in _FLAGS_OF_LAUNCHERS
            at += 1 if alone else 2
        return at if at < len(texts) else None

    def _note(self, node: Simple, launcher: str, texts: list[str], program: int) -> None:
        words = [self.unknowns.word(text) for text in texts]
        self.launches.append(
            Launch(
                line=node.line,
                launcher=launcher,
                options=tuple(words[:program]),
                program=words[program],
                words=tuple(words[program + 1 :]),
            )
        )
