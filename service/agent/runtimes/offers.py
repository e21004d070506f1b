"""The runtimes that an agent can start, by the frameworks that the interpreter of programs finds.

The interpreter is asked in a process of its own, as the user of programs: an import of a framework
takes seconds, and only that interpreter finds what programs find.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tessera.formulation.job.runtime_offers import NO_OFFERS, AgentOffers, RuntimeOffer
from tessera.formulation.job.runtimes import ALPA, DEEPSPEED, JAX, MEGATRON, RUNTIMES, TORCHRUN
from tessera.service.agent.isolation import UnsuitableNode, UserRule, find_user
from tessera.service.agent.keeper.spec import ProgramUser
from tessera.service.agent.process import remove_secrets
from tessera.v1 import agents_pb2 as pb
from tessera.v1.launch_pb2 import RuntimeOffer as RuntimeMessage

log = logging.getLogger(__name__)

FRAMEWORKS: Final[Mapping[str, str]] = {
    TORCHRUN: "torch",
    DEEPSPEED: "deepspeed",
    MEGATRON: "torch",  # Megatron-LM itself is next to the script
    JAX: "jax",
    ALPA: "alpa",
}
"""The module without which no program of a runtime starts."""

CONTAINER_TOOLS: Final = ("docker", "podman", "apptainer", "enroot")

CHECK_S: Final = 5.0
"""Seconds between two looks at whether something was installed or removed."""

ANSWER_S: Final = 10.0
"""Seconds that an interpreter may take to answer. An agent that restarts waits for it, and its lease
must not end meanwhile.
"""

MAX_ANSWER_BYTES: Final = 100_000
MAX_PLACES: Final = 64
MAX_TEXT_CHARS: Final = 200
"""Largest numbers of bytes of an answer, of paths that are watched, and of characters of a text."""

_QUESTION: Final = """
import sys
sys.path = list(filter(None, sys.path))
import importlib.util, json, platform, site
try:
    from importlib.metadata import version
except ImportError:
    version = lambda name: ""
modules, places = {}, [*sys.path, site.getusersitepackages()]
for name in sys.argv[1:]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        continue
    if spec is None or spec.origin in (None, "namespace"):
        continue
    places.append(spec.origin)
    try:
        modules[name] = version(name)
    except Exception:
        modules[name] = ""
print(json.dumps([platform.python_version(), sys.executable, modules, places]))
"""
"""A program for Python 3.6 and later, because Alpa needs an old one. It imports no framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferSettings:
    """The settings that decide what an agent can start.

    ``python`` is the interpreter of programs, and ``environment`` the agent's own. ``refusal`` says
    why the agent runs no programs; it is "" if it does.
    """

    python: str = "python3"
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    users: UserRule = field(default_factory=UserRule)
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class _ModuleAnswer:
    """The answer of an interpreter: its versions of modules, and the paths on which they depend."""

    python: str  # its version
    executable: str
    modules: Mapping[str, str]
    places: tuple[str, ...]


class OfferWatch:
    """The runtimes that an agent can start now. ``refresh`` looks again, which may block for long."""

    def __init__(self, settings: OfferSettings) -> None:
        self._settings = settings
        self._places: tuple[str, ...] = ()
        self._states: tuple[object, ...] = ()
        self._request = asyncio.Event()
        self.offers = NO_OFFERS

    def find_problem(self, runtime: str) -> str:
        """Return why a runtime cannot be started, or ""."""
        return next((o.problem for o in self.offers.runtimes if o.runtime == runtime), "")

    def check_soon(self) -> None:
        """Look again, although no path has changed: a program could not be started."""
        self._request.set()

    def refresh(self, *, is_forced: bool = True) -> bool:
        """Ask again if ``is_forced``, or if a path has changed; return whether the answer has."""
        if self._read_states() == self._states and not is_forced:
            return False
        last_offers, self.offers = self.offers, self._find_offers()
        self._states = self._read_states() if self._places else ()  # without an answer, ask again
        return self.offers != last_offers

    async def watch(self, notify: Callable[[AgentOffers], object]) -> None:
        """Call ``notify`` whenever the offers change; never return."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._request.wait()
            is_forced = self._request.is_set()
            self._request.clear()
            if await asyncio.to_thread(self.refresh, is_forced=is_forced):
                runtimes = ", ".join(map(str, self.offers.runtimes))
                log.info(
                    "this agent can start other runtimes than before",
                    extra={"event": "runtimes_changed", "runtimes": runtimes},
                )
                notify(self.offers)

    def _read_states(self) -> tuple[object, ...]:
        """Return values that change when something is installed or removed. No process is started."""
        programs = [self._find_program(name) for name in (self._settings.python, *CONTAINER_TOOLS)]
        return tuple((path, _state_of(path)) for path in (*programs, *self._places))

    def _find_program(self, program: str) -> str:
        """Return the path of a program, or ""."""
        return shutil.which(program, path=self._settings.environment.get("PATH")) or ""

    def _find_offers(self) -> AgentOffers:
        problem, silence, place = self._settings.refusal, "", ""
        modules, tools = dict[str, str](), list(map(self._find_program, CONTAINER_TOOLS))
        self._places = ()
        try:
            answer = self._ask(self._find_user())
        except UnsuitableNode as error:
            problem = problem or error.problem
        except _NoAnswer as error:
            silence = str(error)
        else:
            modules, place = dict(answer.modules), f" in {answer.executable}"
            self._places = answer.places
            tools.insert(0, f"Python {answer.python} ({answer.executable})")
        runtimes = []
        for name, runtime in RUNTIMES.items():
            module = FRAMEWORKS.get(name, "")
            obstacle = problem if runtime.trains else ""
            if module and module not in modules:
                obstacle = obstacle or silence or f"no module {module}{place}"
            version = "" if obstacle or not module else f"{module} {modules[module]}".rstrip()
            runtimes.append(RuntimeOffer(runtime=name, version=version, problem=obstacle))
        return AgentOffers(runtimes=tuple(runtimes), tools=tuple(filter(None, tools)))

    def _find_user(self) -> ProgramUser:
        """Return the user of programs, the first of those that jobs may name if there is no other.

        Raises:
            UnsuitableNode: there is no such user.
        """
        rule, uid = self._settings.users, os.geteuid()
        if uid == 0 and not rule.default and rule.allowed:
            return find_user(rule.allowed[0])
        return rule.choose("", uid)

    def _ask(self, user: ProgramUser) -> _ModuleAnswer:
        """Ask the interpreter for its modules. Raises _NoAnswer."""
        python = self._find_program(self._settings.python)
        if not python:
            raise _NoAnswer(f"there is no {self._settings.python} for programs; see --python")
        text = self._run((python, "-c", _QUESTION, *dict.fromkeys(FRAMEWORKS.values())), user)
        try:
            version, executable, modules, places = json.loads(text)
            return _ModuleAnswer(
                python=str(version)[:MAX_TEXT_CHARS],
                executable=str(executable)[:MAX_TEXT_CHARS],
                modules={str(k): str(v)[:MAX_TEXT_CHARS] for k, v in modules.items()},
                places=tuple(map(str, places[:MAX_PLACES])),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise _NoAnswer(f"{python} does not say which modules it has") from error

    def _run(self, words: Sequence[str], user: ProgramUser) -> str:
        """Return the output of a program that runs as ``user``. Raises _NoAnswer."""
        environment = remove_secrets(self._settings.environment) | {"HOME": user.home}
        environment.pop("PYTHONPATH", None)  # programs do not get the agent's
        switch: dict[str, Any] = {}
        if user.uid != os.geteuid():
            switch = {"user": user.uid, "group": user.gid, "extra_groups": user.groups}
        try:
            process = subprocess.run(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=ANSWER_S,
                check=True,
                **switch,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise _NoAnswer(f"{words[0]} does not run: {error}"[:MAX_TEXT_CHARS]) from error
        return str(process.stdout[:MAX_ANSWER_BYTES], errors="replace")


class _NoAnswer(Exception):
    """A program did not answer, and why."""


def add_offers(hello: pb.Hello, offers: AgentOffers) -> pb.Hello:
    """Return an agent's hello with its offers."""
    message = pb.Hello()
    message.CopyFrom(hello)
    del message.runtimes[:], message.tools[:]
    message.tools.extend(offers.tools)
    message.runtimes.extend(
        RuntimeMessage(runtime=o.runtime, version=o.version, problem=o.problem)
        for o in offers.runtimes
    )
    return message


def _state_of(path: str) -> tuple[int, ...]:
    """Return values that identify a file, or a folder with its entries; () without one."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
