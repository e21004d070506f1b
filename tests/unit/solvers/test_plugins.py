"""Plug-ins: schedulers and objectives of users' own modules, their loading and their refusal."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.plugins import find_plugin, references_in
from tessera.formulation.round.grammar import parse_objective
from tessera.modelling import Problem
from tessera.service.cli.main import app
from tessera.simulator.comparison.policies import options_of, plugin_files
from tessera.simulator.comparison.runs import RunRequest
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.run import Decider
from tessera.solvers.plugins import load_objectives, load_scheduler
from tessera.solvers.schedulers.registry import is_interruptible, make_scheduler
from tests.support.builders import a_random_snapshot

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"

LAB = """
from dataclasses import dataclass
from typing import Annotated
import numpy as np
from tessera.formulation.round.objectives.values import ColumnValues
from tessera.solvers.schedulers.parameters import ParameterRule

class Nobody:
    name = "nobody"
    def choose(self, seen):
        return np.full(len(seen.draft.current), -1)

@dataclass(frozen=True)
class Few:
    most: Annotated[int, ParameterRule("WHOLE")] = 1
    name: str = "few"
    def choose(self, seen):
        choice = np.full(len(seen.draft.current), -1)
        choice[: self.most] = seen.draft.job_start[: self.most]
        return choice

class TooMuch:
    name = "too-much"
    def choose(self, seen):
        return seen.draft.job_start[1:] - 1

class Neighbours:
    name = "neighbours"
    def choose(self, seen):
        return np.roll(seen.draft.job_start[:-1], 1)

class Floats:
    name = "floats"
    def choose(self, seen):
        return np.zeros(len(seen.draft.current))

class Nameless:
    def choose(self, seen): ...

class Numbered(Nobody):
    name = 7

class Choosy(Nobody):
    def choose(self, seen, again): ...

class Demanding(Nobody):
    def __init__(self, budget): ...

class Even:
    def __call__(self, draft):
        return ColumnValues(gross=np.ones(len(draft.cell)), price=np.zeros(len(draft.cell)), unit="jobs")

def three(draft):
    return 3

def short(draft):
    return ColumnValues(gross=np.ones(1), price=np.zeros(1), unit="jobs")

def wild(draft):
    return ColumnValues(gross=np.full(len(draft.cell), np.nan), price=np.zeros(len(draft.cell)), unit="jobs")

def paid(draft):
    return ColumnValues(gross=np.ones(len(draft.cell)), price=-np.ones(len(draft.cell)), unit="jobs")

def without_arguments(): ...

number = 3
""".replace('"WHOLE"', 'kind="whole", low=0, high=9, meaning="m", source="s"')


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return the name of a module in the current folder, which no other test has."""
    name = f"lab_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_scheduler_is_used_by_its_reference_once_it_is_loaded(lab: str) -> None:
    reference = f"{lab}:Nobody"
    with pytest.raises(InvalidInput, match="is not among the plug-ins that may be used here"):
        make_scheduler(reference)
    assert lab not in sys.modules  # the name alone imports nothing
    path = list(sys.path)
    load_scheduler(reference)
    assert sys.path == path
    assert make_scheduler(reference).name == "nobody"
    assert not is_interruptible(reference)
    outcome = Decider(options_of(reference))(a_random_snapshot(1, jobs=3))
    assert (outcome.solution.choice == -1).all()
    assert not outcome.violations


def test_a_plugin_has_the_parameters_that_it_declares(lab: str) -> None:
    snapshot = a_random_snapshot(1, jobs=4)
    running = [
        int((Decider(options_of(policy))(snapshot).solution.choice >= 0).sum())
        for policy in (f"{lab}:Few", f"{lab}:Few@most=2")
    ]
    assert running == [1, 2]
    with pytest.raises(InvalidInput, match="most must be a whole number from 0 to 9"):
        options_of(f"{lab}:Few@most=10")


def test_an_objective_is_part_of_the_grammar_once_it_is_loaded(lab: str) -> None:
    text = f"0.5*{lab}:Even + jct then throughput"
    assert references_in(text) == [f"{lab}:Even"]
    with pytest.raises(InvalidInput, match="is not an objective"):
        parse_objective(text)
    assert lab not in sys.modules
    load_objectives(text)
    first, last = parse_objective(text)
    assert [(term.objective, term.weight) for term in first.terms] == [
        (f"{lab}:Even", 0.5),
        ("jct", 1.0),
    ]
    assert last.name == "throughput"
    outcome = Decider(options_of(f"ilp:{lab}:Even"))(a_random_snapshot(1, jobs=4))
    assert outcome.goals[-1].unit == "jobs"
    chosen = int((outcome.solution.choice >= 0).sum())
    assert outcome.goals[-1].objective == pytest.approx(chosen)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "has no 'Nothing'; it defines Choosy, Demanding, Even"),
        ("number", "is not a class; name the class of a scheduler"),
        ("Even", "has no name and no choose; a scheduler has a name"),
        ("Nameless", "has no name; a scheduler has a name"),
        ("Numbered", "name must be a text"),
        ("Choosy", r"must take one argument, \(seen\), but missing a required argument: 'again'"),
        ("Demanding", "must be made without arguments, but .*'budget'; give its arguments"),
    ],
)
def test_what_is_no_scheduler_is_refused(lab: str, name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        options_of(f"{lab}:{name}")
    assert find_plugin(f"{lab}:{name}") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "cannot be called; it must be a function"),
        ("without_arguments", r"must take one argument, \(draft\)"),
        ("three", "returned int; return ColumnValues"),
        ("short", r"gross has shape \(1,\), not \(\d+,\)"),
        ("wild", "gross must be finite float64 numbers"),
        ("paid", "price must not be negative"),
    ],
)
def test_what_is_no_objective_is_refused(lab: str, name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Decider(options_of(f"ilp:{lab}:{name}"))(a_random_snapshot(1, jobs=2))


@pytest.mark.parametrize(
    ("module", "text", "message"),
    [
        ("absent_lab", None, "there is no module 'absent_lab'; it must be in the current folder"),
        ("needy_lab", "import absent_library", "needs the module 'absent_library', which is not"),
        ("odd_lab", "def f(:", "odd_lab.py line 1: invalid syntax"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    lab: str, module: str, text: str | None, message: str
) -> None:
    if text is not None:
        Path(f"{module}.py").write_text(text)
    with pytest.raises(InvalidInput, match=message):
        load_scheduler(f"{module}:Any")
    with pytest.raises(InvalidInput, match="must be MODULE:NAME"):
        load_scheduler("no reference")
    assert lab not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TooMuch", r"TooMuch, in round \d+, broke a rule: capacity: gpus/\w+: \d+ are used"),
        ("Neighbours", r"neighbours chose column \d+ for job-\d+, whose columns are"),
        ("Floats", "floats must return a whole number for each of the 8 jobs"),
    ],
)
def test_an_infeasible_decision_ends_the_run_with_what_is_wrong(
    lab: str, name: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        Decider(options_of(f"{lab}:{name}"))(a_random_snapshot(2, jobs=8))


def test_tools_say_what_is_wrong_and_exit_with_2(lab: str) -> None:
    problem = Problem()
    problem.add_gpus("h100", nodes=1, gpus_per_node=8)
    for name in "ab":
        problem.add_job(name, {("h100", 8): 1.0}, samples=100.0)
    problem.save("round.json")

    def run(*arguments: str, code: int) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == code, result.output
        return " ".join(result.output.split())

    shown = run("solve", "round.json", "--scheduler", f"{lab}:Few", code=0)
    assert f"the published scheduler {lab}:Few" in shown
    shown = run("solve", "round.json", "--scheduler", f"{lab}:TooMuch", code=2)
    assert "broke a rule: capacity: gpus/h100: 16 are used, but the capacity is 8" in shown
    shown = run("solve", "round.json", "--objective", f"{lab}:Even then throughput", code=0)
    assert f"{lab}:Even" in shown


def test_a_kept_result_is_void_if_the_module_changes(lab: str) -> None:
    assert plugin_files(f"ilp:{lab}:Even @max_changes=3") == (Path.cwd() / f"{lab}.py",)
    assert plugin_files("ilp:jct") == plugin_files("fcfs") == ()
    run = RunRequest(work=WorkloadSpec(trace=SYNTHETIC), policy=f"{lab}:Nobody")
    before = run.task("x").key("code")
    assert run.task("x").key("code") == before
    Path(f"{lab}.py").write_text(LAB + "\n# changed\n")
    assert run.task("x").key("code") != before


def test_the_examples_of_the_documents_decide_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    snapshot = a_random_snapshot(5, jobs=12, restart_s=0.0)
    smallest = Decider(options_of("smallest_first:SmallestFirst"))(snapshot)
    runs = smallest.solution.choice >= 0
    assert not smallest.violations
    wanted = snapshot.jobs.requested_gpus
    assert wanted[runs].min() == wanted.min()
    most = Decider(options_of("ilp:most_jobs:running then throughput"))(snapshot)
    plain = Decider(options_of("ilp:throughput"))(snapshot)
    count = [int(np.sum(one.solution.choice >= 0)) for one in (most, plain)]
    assert count[0] >= count[1]
    assert most.goals[0].objective == pytest.approx(count[0])


@pytest.mark.parametrize("name", ["smallest_first.py", "most_jobs.py"])
def test_the_page_on_simulating_shows_the_examples_as_they_are(name: str) -> None:
    page = (EXAMPLES.parent / "simulating.md").read_text(encoding="utf-8")
    assert f"$ cat {name}\n{(EXAMPLES / name).read_text(encoding='utf-8')}```" in page
