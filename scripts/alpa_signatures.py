"""Record the signatures of Alpa that the runner of Alpa jobs relies on.

    python scripts/alpa_signatures.py alpa-0.2.3-py3-none-any.whl           write the record
    python scripts/alpa_signatures.py --check alpa-0.2.3-py3-none-any.whl   compare the record

The wheel installs in no interpreter that Tessera runs in, so it is read and never imported
(``pip download alpa==0.2.3 --no-deps``). The record has names and defaults of parameters alone.
Tests compare the runner's calls and the options of plans with it.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "support" / "alpa_signatures.json"

PLACES = {
    "init": "api.py",
    "shutdown": "api.py",
    "parallelize": "api.py",
    "grad": "api.py",
    "value_and_grad": "api.py",
    "ParallelizedFunc.__call__": "api.py",
    "ParallelizedFunc.get_executable": "api.py",
    "ParallelizedFunc.get_last_executable": "api.py",
    "ShardParallel": "parallel_method.py",
    "PipeshardParallel": "parallel_method.py",
    "ManualLayerOption": "pipeline_parallel/layer_construction.py",
    "ManualStageOption": "pipeline_parallel/stage_construction.py",
    "AutoShardingOption": "shard_parallel/auto_sharding.py",
    "mark_pipeline_boundary": "pipeline_parallel/primitive_def.py",
    "get_global_physical_mesh": "device_mesh.py",
    "PhysicalDeviceMesh.get_logical_mesh": "device_mesh.py",
    "MeshDriverExecutable.get_input_placement_specs": "mesh_executable.py",
    "MeshDriverExecutable.sync": "mesh_executable.py",
    "PipeshardDriverExecutable.get_input_placement_specs": (
        "pipeline_parallel/pipeshard_executable.py"
    ),
    "PipeshardDriverExecutable.sync": "pipeline_parallel/pipeshard_executable.py",
    "save_checkpoint": "serialization.py",
    "restore_checkpoint": "serialization.py",
}
"""The module of Alpa in which each function, method or class is defined."""


def read_record(wheel: Path) -> dict[str, Any]:
    """Return the record of a wheel. Raises OSError, KeyError."""
    with zipfile.ZipFile(wheel) as files:
        trees = {place: ast.parse(files.read(f"alpa/{place}")) for place in set(PLACES.values())}
        exported = _exported_names(ast.parse(files.read("alpa/__init__.py")))
    return {
        "provenance": {
            "file": wheel.name,
            "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "content": "names and defaults of parameters, written by scripts/alpa_signatures.py",
        },
        "exported": sorted(exported),
        "parameters": {name: _parameters(trees[place], name) for name, place in PLACES.items()},
    }


def _exported_names(tree: ast.Module) -> set[str]:
    """Return the names that ``import alpa`` offers."""
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _parameters(tree: ast.Module, name: str) -> list[list[str | None]]:
    """Return the parameters as pairs of a name and a default, None where one must be given."""
    first, _, method = name.partition(".")
    node = _member(tree.body, first)
    if isinstance(node, ast.ClassDef):
        if not method and _is_dataclass(node):
            return [
                [field.target.id, ast.unparse(field.value) if field.value else None]
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            ]
        node = _member(node.body, method or "__init__")
    if not isinstance(node, ast.FunctionDef):
        raise KeyError(f"alpa has no function {name}")
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    defaults: list[ast.expr | None] = [None] * (len(names) - len(node.args.defaults))
    pairs = list(zip(names, (*defaults, *node.args.defaults), strict=True))
    pairs += zip((k.arg for k in node.args.kwonlyargs), node.args.kw_defaults, strict=True)
    for stars, argument in (("*", node.args.vararg), ("**", node.args.kwarg)):
        if argument is not None:
            pairs.append((stars + argument.arg, None))
    return [[n, ast.unparse(d) if d else None] for n, d in pairs if n != "self"]


def _member(body: list[ast.stmt], name: str) -> ast.ClassDef | ast.FunctionDef:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise KeyError(f"alpa has no {name}")


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def main() -> None:
    """Write the record of a wheel, or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, help="The file of Alpa 0.2.3.")
    parser.add_argument("--check", action="store_true", help="Compare the record, and write none.")
    options = parser.parse_args()
    record = read_record(options.wheel)
    if not options.check:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    elif record != json.loads(RECORD.read_text(encoding="utf-8")):
        sys.exit(f"{RECORD.name} differs from {options.wheel}; write it again without --check")


if __name__ == "__main__":
    main()
