"""Programs that equal stages share: compiled once, and loaded onto the devices of each stage.

XLA binds a program to its devices when it compiles. Two stages that are alike would thus be
compiled twice. So a compiled program is serialized, and loaded with other devices in the places of
its own. What was seen with JAX 0.10.2 on virtual CPU devices:

* ``serialize_executable.deserialize_and_load(..., execution_devices=...)`` does not move a program:
  it finds devices by their numbers, and the program itself still has its old devices. It moves if
  the numbers are translated, and if options of compilation state the new devices.
* A program from the persistent cache cannot be serialized again: its functions are then missing
  when it runs. Such a program is not moved; the other stages are compiled, and cached, too.
* On GPUs the persistent cache does not distinguish devices, so equal stages find each other there.
  This was read in JAX's source and not tried. So programs are moved on CPUs only.

Moving uses internal parts of JAX. Where they fail, each stage is compiled, which only takes longer.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, SingleDeviceSharding

LOG: Final = logging.getLogger(__name__)

Program: TypeAlias = jax.stages.Compiled
"""A compiled program. Calling it starts it; nothing is traced again."""

_FAULTS_OF_MOVES: Final = (AttributeError, ImportError, RuntimeError, TypeError, ValueError)
"""What JAX's internal parts raise if they changed, or if the back end cannot serialize programs."""

_MOVING_PLATFORMS: Final = ("cpu",)
"""Back ends on which moved programs were seen to compute the same."""

_CACHE_HITS: Final = "/jax/compilation_cache/cache_hits"


@dataclass(slots=True)
class _SharedProgram:
    """A program on each set of devices that asked for it, and what its tracing left."""

    note: Any
    is_movable: bool
    programs: dict[tuple[jax.Device, ...], Program] = field(default_factory=dict)
    payload: tuple[bytes, Any, Any] | None = None

    def move(self, devices: tuple[jax.Device, ...]) -> Program | None:
        """Return the program on other devices, or None if this back end cannot move programs."""
        first, program = next(iter(self.programs.items()))
        try:
            if self.payload is None:
                self.payload = serialize_executable.serialize(program)
            return _load(self.payload, first, devices)
        except _FAULTS_OF_MOVES as error:
            self.is_movable = False
            LOG.info("programs cannot be moved, so each stage's are compiled: %s", error)
            return None


@dataclass(slots=True)
class ProgramLibrary:
    """The programs of an engine. Each is compiled once for all stages that are alike."""

    compilations: int = 0
    """The number of programs that were compiled, or read from the persistent cache."""
    moves: int = 0
    """The number of programs that were loaded onto further devices."""
    _shared: dict[Hashable, _SharedProgram] = field(default_factory=dict)

    def compile(
        self,
        key: Hashable,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        devices: Sequence[jax.Device],
        *,
        outputs: Any = None,
        donated: tuple[int, ...] = (),
        note: Callable[[], Any] = lambda: None,
    ) -> tuple[Program, Any]:
        """Return the program of a function on these devices, and what its tracing left.

        ``key`` holds all that the function closes over. ``arguments`` are ``jax.ShapeDtypeStruct``
        with shardings on the devices. ``outputs`` are shardings, or None where the compiler may
        choose. ``note`` is called after the tracing; stages that share the program get its result.
        """
        whole_key = (key, _describe(arguments), _describe(outputs), donated)
        place, shared = tuple(devices), self._shared.get(whole_key)
        if shared is not None:
            program = shared.programs.get(place)
            if program is None and shared.is_movable:
                program = shared.move(place)
                self.moves += program is not None
            if program is not None:
                shared.programs[place] = program
                return program, shared.note
        hits = _count_hits()
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=outputs)
        program = jitted.lower(*arguments).compile()
        self.compilations += 1
        if shared is None:
            is_new, platform = _count_hits() == hits, place[0].platform
            is_movable = is_new and platform in _MOVING_PLATFORMS
            shared = self._shared[whole_key] = _SharedProgram(note(), is_movable)
        shared.programs[place] = program
        return program, note()


def _state_options(assignment: np.ndarray[Any, Any], backend: Any) -> Any:
    """Return options of compilation that state the devices, as JAX's own cache does."""
    from jax._src import compiler  # noqa: PLC0415  an internal module, which may be missing

    return compiler.get_compile_options(
        num_replicas=1,
        num_partitions=assignment.size,
        device_assignment=assignment,
        backend=backend,
    )


def _load(
    payload: tuple[bytes, Any, Any], old: Sequence[jax.Device], new: Sequence[jax.Device]
) -> Program:
    """Return a serialized program with new devices in the places of the old ones."""
    client = new[0].client

    class Reader(serialize_executable._JaxPjrtUnpickler):
        """A reader that puts the new devices into the program, too."""

        def persistent_load(self, pid: tuple[Any, ...]) -> Any:
            """Return the object with this number: the program, a device or the client."""
            if pid[0] != "exec":
                return super().persistent_load(pid)  # type: ignore[no-untyped-call]
            options = _state_options(np.array(new, dtype=object).reshape(1, -1), client)
            return client.deserialize_executable(pid[1], self.execution_devices, options)

    serialized, in_tree, out_tree = payload
    reader = Reader(io.BytesIO(serialized), client, new)  # type: ignore[no-untyped-call]
    reader.devices_by_id = {before.id: after for before, after in zip(old, new, strict=True)}
    unloaded, arguments, no_kwargs = reader.load()
    return jax.stages.Compiled(
        unloaded.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs
    )


def _describe(tree: Any) -> Hashable:
    """Return shapes, types and shardings without the devices, as a part of a key."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
    return structure, tuple(_describe_leaf(leaf) for leaf in leaves)


def _describe_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, str(leaf.dtype), _describe_sharding(leaf.sharding)
    return _describe_sharding(leaf)


def _describe_sharding(sharding: Any) -> Hashable:
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        return mesh.axis_names, mesh.axis_sizes, tuple(sharding.spec), sharding.memory_kind
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return type(sharding).__name__
    raise TypeError(f"{sharding} is not a sharding on a mesh")


_hits = 0
_counts_hits = False


def _count_hits() -> int:
    """Return the number of programs that came from the persistent cache since the first call."""
    global _counts_hits
    if not _counts_hits:
        jax.monitoring.register_event_listener(_note_hit)
        _counts_hits = True
    return _hits


def _note_hit(event: str, **_: Any) -> None:
    global _hits
    if event == _CACHE_HITS:
        _hits += 1
