"""The runner of Alpa jobs, and the signatures of the Alpa that it calls."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from inspect import Parameter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.alpa_image.alpa_record import RECORD, signature_of

ROOT: Final = Path(__file__).parents[3]
RUNNER: Final = ROOT / "service" / "agent" / "programs" / "alpa_runner.py"
METHODS: Final = {
    "get_logical_mesh": ("PhysicalDeviceMesh.get_logical_mesh",),
    "get_executable": ("ParallelizedFunc.get_executable",),
    "get_last_executable": ("ParallelizedFunc.get_last_executable",),
    "get_input_placement_specs": (
        "MeshDriverExecutable.get_input_placement_specs",
        "PipeshardDriverExecutable.get_input_placement_specs",
    ),
    "sync": ("MeshDriverExecutable.sync", "PipeshardDriverExecutable.sync"),
}
"""The methods of Alpa's objects that the runner calls, and where they are recorded."""


def parse_runner() -> ast.Module:
    return ast.parse(RUNNER.read_text(), feature_version=(3, 8))


def calls_of_alpa(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Return the calls of Alpa's functions and methods, with their names in the record."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(function := node.func, ast.Attribute):
            continue
        if isinstance(function.value, ast.Name) and function.value.id == "alpa":
            found.append((function.attr, node))
        else:
            found += [(name, node) for name in METHODS.get(function.attr, ())]
    return found


def bind(name: str, call: ast.Call) -> None:
    """Raise TypeError unless Alpa takes the arguments of ``call``."""
    keywords = {k.arg: None for k in call.keywords if k.arg is not None}
    signature_of(name).bind(*call.args, **keywords)


def test_the_runner_has_the_syntax_of_python_3_8_and_needs_nothing_but_alpa() -> None:
    imported = {
        name.partition(".")[0]
        for node in ast.walk(parse_runner())
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"alpa"}


def test_alpa_takes_every_call_that_the_runner_makes() -> None:
    calls = calls_of_alpa(parse_runner())
    for name, call in calls:
        assert "." in name or name in RECORD["exported"], name
        bind(name, call)
    names = {name for name, _ in calls}
    assert names == set(RECORD["parameters"]) - {
        "ParallelizedFunc.__call__",  # a call of what parallelize returns
        *("grad", "value_and_grad", "mark_pipeline_boundary"),  # of users' programs
    }


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("init", "alpa.init(cluster='ray', nodes=2)"),
        ("restore_checkpoint", "alpa.restore_checkpoint('path', 3)"),
        ("ManualLayerOption", "alpa.ManualLayerOption(False, (), 3)"),
    ],
)
def test_a_call_that_alpa_does_not_take_is_found(name: str, call: str) -> None:
    ((found, node),) = calls_of_alpa(ast.parse(call))
    assert found == name
    with pytest.raises(TypeError):
        bind(found, node)


def test_the_record_has_names_and_defaults_alone() -> None:
    for name, pairs in RECORD["parameters"].items():
        assert all(isinstance(text, str) and len(text) < 60 for text, _ in pairs), name
    required: Any = signature_of("restore_checkpoint").parameters["step"].default
    assert required is Parameter.empty


@pytest.mark.skipif(
    "TESSERA_ALPA_WHEEL" not in os.environ,
    reason="TESSERA_ALPA_WHEEL names no wheel of Alpa (pip download alpa==0.2.3 --no-deps)",
)
def test_the_record_is_that_of_the_real_package() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "alpa_signatures.py"), "--check"]
    subprocess.run([*command, os.environ["TESSERA_ALPA_WHEEL"]], check=True)
