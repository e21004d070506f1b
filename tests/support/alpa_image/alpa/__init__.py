"""A stand-in for Alpa: it takes the same arguments, and computes with plain numbers.

Parts of checkpoints are written only by ``sync``, as Alpa's workers write in the background. The
file ``alpa-calls.jsonl`` of the job's directory lists the calls.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alpa_record import signature_of  # type: ignore[import-not-found]

WAITING: dict[Path, float] = {}
"""Parts of checkpoints that workers have not written yet."""


def take(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, as Alpa's ``name`` would get them, and list the call."""
    values = dict(signature_of(name).bind(*args, **keywords).arguments)
    calls = Path(os.environ["TESSERA_JOB_DIR"], "alpa-calls.jsonl")
    with calls.open("a", encoding="utf-8") as file:
        file.write(json.dumps([name, values], default=_plain) + "\n")
    return values


def _plain(value: object) -> object:
    return value.values if isinstance(value, Options) else type(value).__name__


class Options:
    """Options of any class of Alpa."""

    def __init__(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.name, self.values = name, take(name, args, keywords)


def maker_of(name: str) -> Callable[..., Options]:
    """Return what makes options of Alpa's class ``name``."""
    return lambda *args, **keywords: Options(name, args, keywords)


AutoShardingOption = maker_of("AutoShardingOption")
ManualLayerOption = maker_of("ManualLayerOption")
ManualStageOption = maker_of("ManualStageOption")
PipeshardParallel = maker_of("PipeshardParallel")
ShardParallel = maker_of("ShardParallel")


class Mesh:
    """The devices of the cluster."""

    def get_logical_mesh(self, *args: Any, **keywords: Any) -> Options:
        """Return a shape of the devices."""
        return Options("PhysicalDeviceMesh.get_logical_mesh", args, keywords)


class Value:
    """A number on devices, which Alpa's arrays give by ``_value``."""

    def __init__(self, number: float) -> None:
        self._value = number


class Executable:
    """A compiled function."""

    def get_input_placement_specs(self) -> tuple[str, str]:
        """Return the places of the state and of a batch."""
        return "state's places", "batch's places"

    def sync(self) -> None:
        """Let workers finish."""
        if os.environ.get("FAKE_ALPA") == "loses parts":
            WAITING.clear()
        for path, number in WAITING.items():
            path.joinpath("metadata_0").write_text(json.dumps(number))
        WAITING.clear()


class ParallelizedFunc:
    """A step of training."""

    def __init__(self, function: Callable[[Any, Any], tuple[Any, float]]) -> None:
        self._function = function
        self._executable: Executable | None = None

    def __call__(self, *args: Any) -> tuple[Any, Value]:
        """Take a step."""
        self._executable = Executable()
        state, loss = self._function(*args)
        return state, Value(loss)

    def get_executable(self, *args: Any) -> Executable:
        """Compile for arguments like these."""
        take("ParallelizedFunc.get_executable", args, {})
        self._executable = Executable()
        return self._executable

    def get_last_executable(self) -> Executable | None:
        """Return what was compiled last."""
        return self._executable


def init(*args: Any, **keywords: Any) -> None:
    """Use the Ray cluster of RAY_ADDRESS."""
    take("init", args, keywords)
    assert os.environ["RAY_ADDRESS"]


def shutdown(*args: Any, **keywords: Any) -> None:
    """Leave the cluster."""
    take("shutdown", args, keywords)


def parallelize(*args: Any, **keywords: Any) -> ParallelizedFunc:
    """Return the function as Alpa would run it."""
    return ParallelizedFunc(take("parallelize", args, keywords)["fun"])


def get_global_physical_mesh(*args: Any, **keywords: Any) -> Mesh:
    """Return all devices."""
    take("get_global_physical_mesh", args, keywords)
    return Mesh()


def save_checkpoint(*args: Any, **keywords: Any) -> None:
    """Write a state of numbers."""
    values = take("save_checkpoint", args, keywords)
    folder = Path(values["ckpt_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath(f"checkpoint_{values['step']}").write_text(json.dumps(list(values["target"])))
    for name, number in values["target"].items():
        part = folder / f"state.{name}"
        part.mkdir(exist_ok=True)
        WAITING[part] = number


def restore_checkpoint(*args: Any, **keywords: Any) -> dict[str, float]:
    """Read a state of numbers."""
    values = take("restore_checkpoint", args, keywords)
    assert values["placement_specs"] == "state's places"
    if os.environ.get("FAKE_ALPA") == "cannot restore":
        raise ValueError("another model")
    folder = Path(values["ckpt_dir"])
    names = json.loads(folder.joinpath(f"checkpoint_{values['step']}").read_text())
    return {n: json.loads((folder / f"state.{n}" / "metadata_0").read_text()) for n in names}
