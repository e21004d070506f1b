"""Reader of the commands that a shell script would start, without a shell.

A script is followed as bash would run it: its assignments, lists, functions, conditions and loops.
Nothing is executed. What only a run decides is unknown: the output of programs, the environment
and the script's own arguments. If a condition is unknown, all of its branches are followed, and
what they leave different is unknown, too. Conditions take variables that nothing sets as not set,
except for those that a scheduler sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tessera.estimator.stated import shell_conditions as conditions
from tessera.estimator.stated.shell_syntax import (
    Arithmetic,
    Assignment,
    Case,
    Chain,
    Computation,
    DoubleBrackets,
    For,
    Function,
    Group,
    If,
    Node,
    Part,
    Pipeline,
    Simple,
    Substitution,
    Text,
    Use,
    While,
    Word,
    parse_script,
)
from tessera.estimator.stated.shell_values import (
    ASSUMED,
    Calculation,
    ShellWord,
    Unknowns,
    Value,
    edit,
    fields_of,
    is_unknown,
    matches,
    may_be_empty,
    number_of,
    plain,
)
from tessera.formulation.errors import InvalidInput

MAX_STEPS: Final = 20_000
"""Largest number of commands and words of a script, with those of its variables and loops."""
MAX_CALLS: Final = 10
"""Deepest nesting of functions and of scripts in scripts."""

_FROM_OUTSIDE: Final = re.compile(
    r"(?:SLURM|PBS|LSB|OMPI|PMI|PMIX|SGE|PET|TORCHELASTIC|KUBERNETES|FLUX|COBALT|MLP|ARNOLD|CUDA_VISIBLE)_?\w*"
    r"|WORLD_SIZE|RANK|LOCAL_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT|HOSTNAME|HOME|USER|PWD|OLDPWD|PATH|SHELL|TMPDIR"
    r"|RANDOM|SECONDS|UID|EUID|PPID|LINENO|BASH\w*|FUNCNAME|HOSTFILE|NHOSTS|NNODES_FROM_ENV"
)
"""Variables that a scheduler, a launcher or the system sets."""
_SHELLS: Final = frozenset({"bash", "sh", "zsh", "dash"})
_TRUE_COMMANDS: Final = frozenset(
    "cd pushd popd echo printf trap mkdir ulimit module sleep wait date alias shopt umask".split()
)
_NO_STARTERS: Final = frozenset(
    "echo printf cat tee grep ls cp mv rm sed awk chmod which type kill pkill ps ln tar find git pip cd test"
    " head tail vim mkdir touch wc sort diff true false rsync scp read trap source export pgrep".split()
)
"""Commands that start nothing, even if a launcher is among their words."""
_WRAPPERS: Final = frozenset({"exec", "command", "builtin", "nohup", "time"})
_REMOTE: Final = frozenset(
    {"ssh", "pdsh", "tmux", "screen", "clush", "script", "su", "docker", "sbatch"}
)
_LAUNCHER: Final = re.compile(r"(?:.*/)?(?:torchrun|deepspeed|accelerate|python[0-9.]*)")
_PROGRAM: Final = re.compile(r".+\.py")
_MODULES_OF_LAUNCHERS: Final = frozenset({"torch.distributed.launch", "torch.distributed.run"})
_FLAGS_OF_LAUNCHERS: Final = frozenset(
    "--standalone --use-env --use_env --no-python --no_python --run-path --module -m --force_multi"
    " --no_local_rank --no_ssh --use_deepspeed --use_fsdp --multi_gpu -u --enable_each_rank_log".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts a Python program: the launcher's arguments, and the program's."""

    line: int
    launcher: str
    options: tuple[ShellWord, ...]
    program: ShellWord
    words: tuple[ShellWord, ...]


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
    run.follow(script)
    if not run.launches and run.state.ended and run.assumed:
        # The script only explains its arguments, or stops, if they are not given.
        run = _Run(field, strict=True)
        run.follow(script)
    return run.script()


@dataclass(slots=True)
class _State:
    """The variables and functions of a shell."""

    variables: dict[str, Value] = field(default_factory=dict)
    exported: frozenset[str] = frozenset()
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: list[str] | None = None
    """The arguments of the script or function; None if they are not known."""
    ended: str = ""
    """"exit", "return", "break" or "continue" where the commands that follow are not reached."""

    def copy(self) -> _State:
        return replace(
            self,
            variables=dict(self.variables),
            functions=dict(self.functions),
            arguments=None if self.arguments is None else list(self.arguments),
        )


Items = Iterator[tuple[str, bool, bool]]
"""Pieces of a word: their text, whether it is quoted, and whether it begins a new word."""


class _Run:
    """A script that is followed."""

    def __init__(self, field: str, *, strict: bool = False) -> None:
        self._field = field
        self._strict = strict
        self.state = _State()
        self.unknowns = Unknowns()
        self.launches: list[Launch] = []
        self.assumed: dict[str, None] = {}
        self._commands: list[list[str]] = []
        self._files: dict[str, str] = {}
        self._others: dict[str, None] = {}
        self._left = MAX_STEPS
        self._calls = 0
        self._testing = False
        self._locals: list[dict[str, Value | None]] = []

    def follow(self, node: Node) -> None:
        """Follow the commands of the whole script."""
        self._run(node)

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
            files={name: str(word(text)) for name, text in self._files.items()},
            assumed=tuple(self.assumed),
            others=tuple(self._others),
        )

    def _charge(self, texts: Iterable[str]) -> None:
        """Refuse a script that uses its variables too often or too deeply."""
        for text in texts:
            self._left -= 1 + len(text) // 100
        if self._left < 0:
            raise InvalidInput(self._field, f"has more than {MAX_STEPS:,} words, or very long ones")

    # Commands. Each returns whether it succeeds, or None if that is unknown.

    def _run(self, node: Node) -> bool | None:
        self._charge([""])
        if isinstance(node, Chain):
            return self._chain(node)
        if isinstance(node, Simple):
            return self._simple(node)
        if isinstance(node, Pipeline):
            return self._pipeline(node)
        if isinstance(node, Group):
            return self._in_own_shell(node.body) if node.own_shell else self._run(node.body)
        if isinstance(node, If):
            return self._if(node.arms, node)
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
                status = self._run(part)
            elif status is None:
                status = self._perhaps(part, part_line(part))
        return status

    def _perhaps(self, node: Node, line: int) -> bool | None:
        """Follow commands that are reached or not."""
        self._branches([lambda: self._run(node), lambda: None], line)
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

    def _joined(self, states: Sequence[_State], line: int) -> _State:
        """Return what several branches leave. Those that end the script are not followed."""
        live = [state for state in states if not state.ended] or states[:1]
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

    def _in_own_shell(self, node: Node) -> bool | None:
        before = self.state
        self.state = before.copy()
        status = self._run(node)
        self.state = before
        return status

    def _pipeline(self, node: Pipeline) -> bool | None:
        status: bool | None = True
        for part in node.parts:
            status = self._run(part) if len(node.parts) == 1 else self._in_own_shell(part)
        if node.negated:
            return None if status is None else not status
        return status

    def _if(self, arms: Sequence[tuple[Node, Node]], node: If) -> bool | None:
        if not arms:
            return True if node.otherwise is None else self._run(node.otherwise)
        (condition, body), rest = arms[0], arms[1:]
        holds = self._run(condition)
        if self.state.ended:
            return None
        if holds is None:
            self._branches([lambda: self._run(body), lambda: self._if(rest, node)], node.line)
            return None
        return self._run(body) if holds else self._if(rest, node)

    def _for(self, node: For) -> bool | None:
        if node.words is None:
            words = self.state.arguments or []
        else:
            words = [text for word in node.words for text in self.fields(word)]
        if any(is_unknown(word) for word in words):
            words = [self.unknowns.mark(f"${node.name}", node.line)]
        for word in words:
            self.state.variables[node.name] = word
            self._run(node.body)
            if self._leaves_loop():
                break
        return None

    def _leaves_loop(self) -> bool:
        """Return whether a loop ends early, after the commands of one turn."""
        ended = self.state.ended
        if ended in ("break", "continue"):
            self.state.ended = ""
        return ended not in ("", "continue")

    def _while(self, node: While) -> bool | None:
        while True:
            self._charge([""])
            holds = None if node.condition is None else self._run(node.condition)
            if holds is None:
                self._perhaps(Chain(((";", node.body),)), node.line)
                self._leaves_loop()
                self._forget_changes(node)
                return None
            if holds is node.until or self.state.ended:
                return None
            before = self.state.copy()
            self._run(node.body)
            if self._leaves_loop():
                return None
            if self.state == before:  # it would go on for ever
                return None

    def _forget_changes(self, node: While) -> None:
        """Make unknown what a loop of unknown length changes by more in each turn."""
        for name, value in list(self.state.variables.items()):
            texts = [value] if isinstance(value, str) else value
            for text in texts:
                if is_unknown(text) and len(text) > 400:
                    self.state.variables[name] = self.unknowns.mark(f"${name}", node.line)

    def _case(self, node: Case) -> bool | None:
        self._testing = True
        subject = self.text(node.subject)
        self._testing = False
        if is_unknown(subject):
            runs = [lambda body=body: self._run(body) for _, body in node.arms]
            self._branches([*runs, lambda: None], node.line)
            return None
        for patterns, body in node.arms:
            answers = [matches(plain(subject), conditions.pattern_text(p, self)) for p in patterns]
            if any(answers):
                return self._run(body)
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
        status = self._command(fields, node)
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

    def _command(self, fields: Sequence[str | Assignment], node: Simple) -> bool | None:
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
        builtin = getattr(self, f"_do_{name}", None) if name.isalpha() else None
        if name == ".":
            builtin = self._do_source
        if builtin is not None:
            return builtin(rest, node)
        if name in (":", "true", "false"):
            return name != "false"
        return self._external(texts, node)

    # Commands of the shell.

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
            added = [text for word in assignment.elements for text in self.fields(word)]
            kept = [old] if isinstance(old, str) and old else list(old)
            variables[name] = kept + added if assignment.appended else added
            return
        value = self.text(assignment.value)
        self._charge([value])
        if assignment.index is not None:
            place = number_of(self._calculate(assignment.index) or "?")
            elements = [old] if isinstance(old, str) and old else list(old)
            if place is None or not -len(elements) <= place <= len(elements):
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
        status = self._run(body)
        self._calls -= 1
        self._set_again(self._locals.pop())
        self.state.arguments = before
        if self.state.ended == "return":
            self.state.ended = ""
        return status

    def _child(self, text: str, arguments: list[str], line: int) -> bool | None:
        """Follow a script that another shell runs with the exported variables."""
        before = self.state
        variables = {n: v if n in before.exported else "" for n, v in before.variables.items()}
        self.state = _State(variables, before.exported, arguments=arguments)
        status = self._nested_script(text, line)
        self.state = before
        return status

    def _nested_script(self, text: str, line: int) -> bool | None:
        if self._calls >= MAX_CALLS:
            raise InvalidInput(self._field, f"has scripts in scripts, {MAX_CALLS} levels deep")
        self._charge([text])
        self._calls += 1
        status = self._run(parse_script(self._field, plain(text), line))
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
                self.state.variables[word] = ""
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

    # Programs.

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
                if re.search(r"[ \t\n].*\.(?:py|sh)\b", script):
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

    # Words.

    def fields(self, word: Word) -> list[str]:
        """Return the words into which a word expands."""
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
        edited: list[tuple[str, bool, bool]] = []
        for text, quoted, begins in items:
            known = not is_unknown(text) and not is_unknown(operand)
            value = edit(plain(text), operator, operand) if known else None
            edited.append((self._mark(use) if value is None else value, quoted, begins))
        return iter(edited)

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
        empty = unset or (not plain(whole) and (operator[0] == ":" or not texts))
        if unset:
            self.assumed.setdefault(use.name)
        if operator in (":?", "?") and empty:
            yield self._mark(use), use.quoted, False
        elif operator in (":+", "+"):
            if not empty:
                yield from self._items(use.operand)
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
        if place is None or is_unknown("".join(elements[:1])) and len(elements) == 1:
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


def part_line(node: Node) -> int:
    """Return the line of a command."""
    while isinstance(node, Chain | Pipeline):
        first = node.parts[0]
        node = first[1] if isinstance(first, tuple) else first
    while isinstance(node, Group):
        return part_line(node.body)
    return 0 if isinstance(node, Function) else node.line
