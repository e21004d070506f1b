"""The documents as a newcomer follows them: in a fresh clone, in order, in real terminals.

``page_blocks.yaml`` lists the pages, and says for each code block of a page what is done with it.
Each page has data of its own, so that no page depends on another one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.documents import Block, Step, blocks, steps, without_comment
from tests.support.terminal import Terminal

ROOT = Path(__file__).parents[2]
CONVENTIONS = Path(__file__).with_name("page_blocks.yaml")
README = "README.md"
"""The page that makes the environment. The others expect it to be active."""

KINDS = ("run", "python", "javascript", "show")
KEYS = {"block", "skip", "before", "output", "codes", *KINDS}

COMMAND_S = 900.0
"""How long a command may take; `make demo` compiles loops where no compiled ones could be copied."""

CONDITION_S = 300.0
CONDITION_PAUSE_S = 1.0
SERVERS = re.compile(r"(?:^|\s)tessera (?:up|serve)\b")
COMMAND = re.compile(r"(?:\$ )?tessera ")
READY = re.compile(r"Tessera is up|serving on")


def load_conventions() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the entries of each page by their blocks."""
    pages = yaml.safe_load(CONVENTIONS.read_text(encoding="utf-8"))
    named: dict[str, dict[str, dict[str, Any]]] = {}
    for page, entries in pages.items():
        named[page] = {entry["block"]: entry for entry in entries or ()}
        assert len(named[page]) == len(entries or ()), f"a block of {page} is classified twice"
    return named


PAGES = load_conventions()


def blocks_of(page: str) -> list[Block]:
    return list(blocks((ROOT / page).read_text(encoding="utf-8")))


def entry_of_command(table: Mapping[str, Any] | None, command: str, default: Any = None) -> Any:
    """Return the entry of ``table`` whose key the command begins with; the longest key counts."""
    keys = [key for key in table or {} if command.startswith(key)]
    return (table or {})[max(keys, key=len)] if keys else default


@pytest.mark.story
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_classified_and_no_other_block_is(page: str) -> None:
    named, present = PAGES[page], [block.first for block in blocks_of(page)]
    unknown = [first for first in present if first not in named]
    assert unknown == [], f"classify these blocks in {CONVENTIONS.name}"
    assert [first for first in named if first not in present] == [], "these blocks are gone"
    for first, entry in named.items():
        assert sum(kind in entry for kind in KINDS) == 1, first
        assert set(entry) <= KEYS, first
        assert not isinstance(entry.get("show"), bool), f"{first}: say why it is only shown"


@pytest.mark.story
@pytest.mark.parametrize("page", PAGES)
def test_conventions_of_commands_name_commands_of_their_block(page: str) -> None:
    for block in blocks_of(page):
        commands = [without_comment(step.command) for step in steps(block)]
        entry = PAGES[page][block.first]
        keys = [key for kind in ("skip", "before", "codes") for key in entry.get(kind, ())]
        keys += [name for names in entry.get("output", {}).values() for name in names]
        for key in keys:
            assert any(command.startswith(key) for command in commands), (block.first, key)


@pytest.mark.story
def test_every_page_for_users_is_followed() -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    with_commands = {
        page
        for page in pages
        if any(COMMAND.match(line) for block in blocks_of(page) for line in block.lines)
    }
    assert with_commands <= set(PAGES), f"list these pages in {CONVENTIONS.name}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fresh clone in which `make demo` need install nothing.

    Its environment holds the clone's own code and the libraries of this one: no network is needed.
    """
    place = tmp_path_factory.mktemp("clone") / "tessera"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, place], check=True)
    head = _git("rev-parse", "HEAD").strip()  # in a work tree the clone's may be another one
    subprocess.run(["git", "-C", place, "checkout", "--quiet", head], check=True)
    _bring_uncommitted(place)
    environment = place / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    protos = place / "proto"
    paths = [place, protos / "gen", protos / "client", sysconfig.get_path("purelib")]
    (site / "here.pth").write_text("".join(f"{path}\n" for path in paths))
    project = tomllib.loads((place / "pyproject.toml").read_text())["project"]
    _describe(site, project)
    for name, target in project["scripts"].items():
        _script(environment / "bin" / name, target)
    for stamp in (".installed-server", ".installed-dev"):
        (environment / stamp).touch()
    return place


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def _bring_uncommitted(place: Path) -> None:
    """Copy what has changed here since the last commit: the test is about these files."""
    changed = _git("diff", "--name-only", "-z", "HEAD").split("\0")
    new = _git("ls-files", "-z", "--others", "--exclude-standard").split("\0")
    for name in filter(None, changed + new):
        (place / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)


def _describe(site: Path, project: Mapping[str, Any]) -> None:
    """Write what an installer would write about the distribution: its version and its plugins."""
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    (folder / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
            for group, points in groups.items()
        )
    )


def _script(path: Path, target: str) -> None:
    module, _, function = target.partition(":")
    path.write_text(
        f"#!{path.parent / 'python'}\nimport sys\nfrom {module} import {function}\n"
        f"sys.exit({function}())\n"
    )
    path.chmod(0o755)


class Reader:
    """A newcomer with two terminals: one for the commands, one for the server."""

    def __init__(self, clone: Path, home: Path) -> None:
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("TESSERA_", "PYTHON"))
        }
        environment |= {"TESSERA_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        environment["XDG_CONFIG_HOME"] = str(home / "config")  # logins
        environment["PATH"] = os.pathsep.join(
            p for p in environment["PATH"].split(os.pathsep) if not p.startswith(sys.prefix)
        )
        self.clone = clone
        self.terminal, self.second = Terminal(clone, environment), Terminal(clone, environment)
        self._serves = False
        self.failures: list[str] = []
        self.untried: list[str] = []

    def activate(self) -> None:
        """Activate the environment in both terminals."""
        for terminal in (self.terminal, self.second):
            assert terminal.run("source .venv/bin/activate", CONDITION_S)[0] == 0

    def close(self) -> None:
        self.stop()
        self.terminal.__exit__()
        self.second.__exit__()

    def follow(self, block: Block, entry: Mapping[str, Any]) -> None:
        """Do what the conventions say of a block."""
        if "python" in entry:
            program = self.clone / "page_block.py"
            program.write_text("\n".join(block.lines) + "\n")
            self._expect(block, "python page_block.py", 0)
            return
        if "javascript" in entry:
            self._run_javascript(block)
            return
        for step in steps(block):
            command = without_comment(step.command)
            if step.made_file:
                (self.clone / step.made_file).write_text(step.shown + "\n")
            elif entry_of_command(entry.get("skip"), command) is None:
                self._type(block, entry, step, command)

    def stop(self) -> None:
        """Stop the server with Ctrl-C; it must end with 0."""
        if self._serves:
            self.second.interrupt()
            code, said = self.second.end(COMMAND_S)
            self._serves = False
            if code:
                self.failures.append(f"the server ended with {code}:\n{said}")

    def _run_javascript(self, block: Block) -> None:
        """Run a block with Node.js and gRPC's packages, where both can be had."""
        (self.clone / "page_block.mjs").write_text("\n".join(block.lines) + "\n")
        install = (
            "npm install --silent --no-save --fetch-retries 0 @grpc/grpc-js @grpc/proto-loader"
        )
        if shutil.which("npm") is None or self.terminal.run(install, CONDITION_S)[0]:
            self.untried.append(f"line {block.line}: Node.js or its packages are not here")
            return
        self._expect(block, "node page_block.mjs", 0)

    def _type(self, block: Block, entry: Mapping[str, Any], step: Step, command: str) -> None:
        if condition := entry_of_command(entry.get("before"), command):
            self._until(condition)
        if SERVERS.search(command):
            self.stop()
            self.second.type(step.command)
            self._serves = True
            self.second.wait_for_match(READY, COMMAND_S)
            return
        code = entry_of_command(entry.get("codes"), command, 0)
        said = self._expect(block, step.command, code)
        if command.startswith("source "):
            self.second.run(step.command, CONDITION_S)
        for how, names in entry.get("output", {}).items():
            if any(command.startswith(name) for name in names):
                self._compare(block, step, said, how)

    def _expect(self, block: Block, command: str, code: int) -> str:
        """Type a command and return its output."""
        found, said = self.terminal.run(command, COMMAND_S)
        if found != code:
            self.failures.append(f"line {block.line}: {command}\nended with {found}:\n{said}")
        return said

    def _until(self, condition: str) -> None:
        until_s, pause = time.monotonic() + CONDITION_S, threading.Event()
        while self.terminal.run(condition, COMMAND_S)[0]:
            assert time.monotonic() < until_s, f"timed out waiting for: {condition}"
            pause.wait(CONDITION_PAUSE_S)

    def _compare(self, block: Block, step: Step, said: str, how: str) -> None:
        """Compare an output with the one that is shown, word by word."""
        found = [text.split() for text in said.splitlines() if text.strip()]
        shown = [text.split() for text in step.shown.splitlines() if text.strip()]
        same = shown[0] in found if how == "head" else all(row in found for row in shown)
        if not same:
            self.failures.append(
                f"line {block.line}: {step.command}\nshows\n{step.shown}\nand prints\n{said}"
            )


@pytest.fixture
def reader(clone: Path) -> Iterator[Reader]:
    """Return the newcomer; PostgreSQL's user must reach the home, which pytest's folders deny it."""
    with tempfile.TemporaryDirectory(prefix="tessera-readme-", ignore_cleanup_errors=True) as home:
        Path(home).chmod(0o755)
        found = Reader(clone, Path(home))
        yield found
        found.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.story if page == README else ()) for page in PAGES],
)
def test_a_page_works_when_it_is_followed_to_the_letter(page: str, reader: Reader) -> None:
    if page != README:
        reader.activate()
    for block in blocks_of(page):
        entry = PAGES[page][block.first]
        if "show" not in entry:
            reader.follow(block, entry)
    reader.stop()
    assert reader.failures == []
    if reader.untried:
        pytest.skip("; ".join(reader.untried))
