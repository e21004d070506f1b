"""Checkpoints by names of layers, which any plan reads: Orbax, and a description of the model."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp

from tessera.jax.engines import Engine, TrainState
from tessera.jax.errors import CheckpointRefused
from tessera.jax.hosts import is_first_host, wait_for_hosts
from tessera.jax.models import named_leaves

FORMAT: Final = 1
"""The version of the layout of checkpoints. Later releases read earlier ones."""

DESCRIPTION: Final = "model.json"
STATE: Final = "state"
SHOWN_DIFFERENCES: Final = 3


def has_finite_parameters(state: TrainState) -> bool:
    """Return whether all parameters are numbers, in the parts of this host.

    A finite loss does not show it, because the loss is taken before the parameters change.
    """
    return all(
        bool(np.isfinite(np.asarray(shard.data, dtype=np.float32)).all())
        for leaf in jax.tree.leaves(state.parameters)
        if jax.numpy.issubdtype(leaf.dtype, np.floating)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    )


def save_checkpoint(path: Path, state: TrainState, iterations: int, seed: int) -> None:
    """Write a checkpoint. ``path`` exists only once all of it is there, from all hosts.

    A checkpoint at the same path, of an earlier run, is replaced.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.absolute().with_name(f"{path.name}.partial")
    if is_first_host():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    wait_for_hosts(f"begin {path.name}")
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        writer.save(partial / STATE, args=ocp.args.StandardSave(_plain(state)))
    if is_first_host():
        written = {"iterations": iterations, "seed": seed, "files": _list_files(partial)}
        text = json.dumps(_describe(state) | written)
        (partial / DESCRIPTION).write_text(text, encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    wait_for_hosts(f"end {path.name}")


def load_checkpoint(path: Path, engine: Engine, iterations: int, seed: int) -> TrainState:
    """Return the state of a checkpoint, where the engine's plan wants it.

    ``iterations`` are those that the checkpoint should hold, and ``seed`` is that of the job.

    Raises:
        CheckpointRefused: it is incomplete or damaged, or of another model, optimizer or seed.
    """
    target = engine.state_shapes()
    description = _read_description(path)
    _check_description(path, description, _describe(target), iterations, seed)
    _check_files(path, description.get("files", {}))
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            plain = reader.restore(
                path.absolute() / STATE, args=ocp.args.StandardRestore(_plain(target))
            )
    except Exception as error:  # Orbax and TensorStore raise many kinds
        line = str(error).strip().partition("\n")[0]
        raise CheckpointRefused(
            f"{path} is damaged, or a part of it is missing ({type(error).__name__}: {line}); go on"
            " from an earlier checkpoint"
        ) from error
    return TrainState(**plain)


def _list_files(folder: Path) -> dict[str, int]:
    """Return the bytes of each file of a checkpoint, by its path in the folder.

    Orbax notices some missing or short files only if it happens to read that part of them.
    """
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def _check_files(path: Path, written: dict[str, int]) -> None:
    present = _list_files(path)
    for name, size in written.items():
        if present.get(name) != size:
            state = f"has {present[name]} of {size} bytes" if name in present else "is missing"
            raise CheckpointRefused(
                f"{path} is damaged: its file {name} {state}; go on from an earlier checkpoint"
            )


def _plain(state: TrainState) -> dict[str, Any]:
    return {"parameters": state.parameters, "optimizer": state.optimizer}


def _describe(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint must have in common with the state onto which it is read."""
    return {
        "format": FORMAT,
        "versions": {name: version(name) for name in ("jax", "optax", "orbax-checkpoint")},
        "parameters": _list_leaves(state.parameters),
        "optimizer": _list_leaves(state.optimizer),
    }


def _list_leaves(tree: Any) -> dict[str, str]:
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in named_leaves(tree)}


def _read_description(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointRefused(
            f"{path} has no readable {DESCRIPTION}, so it is no checkpoint of tessera.jax, or an"
            f" incomplete one: {error}"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointRefused(f"{path / DESCRIPTION} is not an object of JSON")
    return found


def _check_description(
    path: Path, found: dict[str, Any], wanted: dict[str, Any], iterations: int, seed: int
) -> None:
    if found.get("format") != FORMAT:
        raise CheckpointRefused(
            f"{path} has format {found.get('format')}, and this release reads {FORMAT}; update"
            " tessera-client"
        )
    if found.get("iterations") != iterations:
        raise CheckpointRefused(
            f"{path} is of iteration {found.get('iterations')}, not {iterations}"
        )
    if found.get("seed") != seed:
        raise CheckpointRefused(
            f"{path} was written with seed {found.get('seed')}, but the program has {seed}; samples"
            " would be used twice or never"
        )
    for name, of in (("parameters", "model"), ("optimizer", "optimizer")):
        differences = _find_differences(found.get(name, {}), wanted[name])
        if differences:
            shown = "; ".join(differences[:SHOWN_DIFFERENCES])
            raise CheckpointRefused(
                f"{path} is of another {of}: {shown}"
                f"{'; ...' if len(differences) > SHOWN_DIFFERENCES else ''}; use the program that"
                " wrote it, or start from the beginning"
            )


def _find_differences(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    names = [*wanted, *(name for name in found if name not in wanted)]
    return [
        f"{name} is {found.get(name, 'missing')} there and {wanted.get(name, 'missing')} here"
        for name in names
        if found.get(name) != wanted.get(name)
    ]
