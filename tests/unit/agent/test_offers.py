"""The runtimes that an agent offers: those whose frameworks the interpreter of programs finds."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.runtime_offers import AgentOffers
from tessera.formulation.job.runtimes import (
    ALPA,
    COMMAND,
    JAX,
    MEGATRON,
    PROFILER,
    REPLAY,
    TORCHRUN,
)
from tessera.service.agent.isolation import UnsuitableNode, UserRule
from tessera.service.agent.runtimes import offers as offers_module
from tessera.service.agent.runtimes.offers import OfferSettings, OfferWatch, add_offers
from tessera.service.agent.runtimes.protocol import RuntimeChooser
from tessera.service.agent.runtimes.replay import ReplayRuntime
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import a_gang
from tests.support.patience import PATIENCE_S
from tests.support.programs import own_user
from tests.support.pythons import install, make_python


def a_watch(python: str, refusal: str = "") -> OfferWatch:
    watch = OfferWatch(
        OfferSettings(
            python=python,
            environment={"PATH": os.defpath},
            users=UserRule(default=own_user()),
            refusal=refusal,
        )
    )
    watch.refresh()
    return watch


def versions_of(offers: AgentOffers) -> dict[str, str]:
    return {o.runtime: o.version for o in offers.runtimes if not o.problem}


def test_a_runtime_is_offered_with_its_version_if_the_interpreter_finds_its_framework(
    tmp_path: Path,
) -> None:
    python = make_python(tmp_path)
    install(tmp_path, "torch", "2.9.1", "raise SystemExit('it must not be imported')\n")
    install(tmp_path, "alpa")  # without a version
    watch = a_watch(python)
    assert versions_of(watch.offers) == {
        **{REPLAY: "", PROFILER: "", COMMAND: "", ALPA: "alpa"},
        **{TORCHRUN: "torch 2.9.1", MEGATRON: "torch 2.9.1"},
    }
    assert watch.find_problem(JAX) == f"no module jax in {sys.executable}"
    assert watch.find_problem(COMMAND) == ""
    assert watch.offers.tools[0].startswith(f"Python {sys.version.split()[0]} (")


def test_packages_that_are_installed_upgraded_or_removed_later_are_noticed(tmp_path: Path) -> None:
    watch = a_watch(make_python(tmp_path))
    assert JAX not in versions_of(watch.offers)
    assert not watch.refresh(is_forced=False)  # nothing has changed, and nobody is asked
    install(tmp_path, "jax", "0.9")
    assert watch.refresh(is_forced=False)
    assert versions_of(watch.offers)[JAX] == "jax 0.9"
    (tmp_path / "site/jax-0.9.dist-info").rename(tmp_path / "site/jax-1.0.dist-info")
    facts = tmp_path / "site/jax-1.0.dist-info/METADATA"
    facts.write_text(facts.read_text().replace("0.9", "1.0"))
    assert watch.refresh(is_forced=False)
    assert versions_of(watch.offers)[JAX] == "jax 1.0"
    (tmp_path / "site/jax/__init__.py").unlink()  # a folder alone is no module
    assert watch.refresh(is_forced=False)
    assert watch.find_problem(JAX).startswith("no module jax in ")
    assert not watch.refresh()


@pytest.mark.parametrize(
    ("python", "problem"),
    [
        ("no-such-python", "there is no no-such-python for programs; see --python"),
        ("/bin/false", "/bin/false does not run: "),
        ("/bin/true", "/bin/true does not say which modules it has"),
    ],
)
def test_without_an_interpreter_only_commands_and_replays_are_offered(
    python: str, problem: str
) -> None:
    watch = a_watch(python)
    assert set(versions_of(watch.offers)) == {REPLAY, PROFILER, COMMAND}
    assert watch.find_problem(JAX).startswith(problem)


def test_an_agent_that_runs_no_programs_offers_none_and_says_why(tmp_path: Path) -> None:
    watch = a_watch(make_python(tmp_path), refusal="the connection is not encrypted")
    assert set(versions_of(watch.offers)) == {REPLAY, PROFILER}
    assert watch.find_problem(COMMAND) == "the connection is not encrypted"


def test_a_gang_is_refused_unless_its_runtime_is_offered_or_it_brings_its_packages(
    tmp_path: Path,
) -> None:
    watch = a_watch(make_python(tmp_path))
    chooser = RuntimeChooser(dict.fromkeys((JAX, REPLAY), ReplayRuntime()), REPLAY, watch)
    with pytest.raises(UnsuitableNode, match="jax cannot be started here: no module jax in"):
        chooser.require_offered(a_gang(runtime=JAX))
    launch = LaunchSpec(env={"PYTHONPATH": "/opt/jax"})
    chooser.require_offered(a_gang(runtime=JAX, launch=launch))
    chooser.require_offered(a_gang(runtime=REPLAY))


async def test_the_servers_are_told_of_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers_module, "CHECK_S", PATIENCE_S)
    watch, changes = a_watch(make_python(tmp_path)), asyncio.Queue[AgentOffers]()
    watching = asyncio.create_task(watch.watch(changes.put_nowait))
    install(tmp_path, "jax", "0.9")
    watch.check_soon()  # e.g. because a program did not find a module
    async with asyncio.timeout(PATIENCE_S):
        offers = await changes.get()
    watching.cancel()
    hello = add_offers(pb.Hello(agent_id="a", tools=["old"]), offers)
    assert hello.agent_id == "a"
    assert [o.version for o in hello.runtimes if o.runtime == JAX] == ["jax 0.9"]
    assert "old" not in hello.tools
