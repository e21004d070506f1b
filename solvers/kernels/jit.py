"""The compilation of loops: without the interpreter lock, and kept on disk if possible."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, Self, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import platformdirs
from numba.core import config
from numba.core.caching import _CacheLocator

Function = TypeVar("Function", bound=Callable[..., object])
Scalar = TypeVar("Scalar", bound=np.generic)


class LoopCache(_CacheLocator):
    """The place of a compiled function on disk.

    It is a folder of the user's cache for each content of the function's source file. A second
    clone, or a copy that is installed later, finds the machine code that the first compiled.
    Numba's own places depend on the path and the age of the file.
    """

    def __init__(self, source: Path) -> None:
        self._digest = _digest(source)
        self._folder = (
            Path(platformdirs.user_cache_path("tessera-scheduler"))
            / f"loops-numba-{numba.__version__}"
            / f"{source.stem}-{self._digest[:16]}"
        )

    @classmethod
    def from_function(cls, py_func: Callable[..., object], py_file: str) -> Self | None:
        """Return the place of one of our functions, or None for others or if it cannot be written."""
        if not (py_func.__module__ or "").startswith("tessera."):
            return None
        try:
            place = cls(Path(py_file))
            place.ensure_cache_path()
        except OSError:
            return None
        return place

    def ensure_cache_path(self) -> None:
        """Make the folder, or check it. Raises OSError.

        Numba executes what it finds there, so no other user may write to it.
        """
        for folder in reversed((self._folder, *self._folder.parents)):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        for folder in (self._folder, *self._folder.parents[:2]):
            status = folder.stat()
            if status.st_mode & stat.S_IWOTH or status.st_uid not in {0, os.geteuid()}:
                raise PermissionError(f"another user may write to {folder}")
        super().ensure_cache_path()  # type: ignore[no-untyped-call] # Numba types none of it

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """Return a value that changes with the source."""
        return self._digest

    def get_disambiguator(self) -> str:
        """Return an empty string: name and line distinguish a function from others of its file."""
        return ""


@cache
def _digest(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


_PLACES: Final = f"{__name__}.{LoopCache.__name__},InTreeCacheLocator,UserWideCacheLocator"
"""The locators that Numba tries, in order."""

if not (os.environ.get("NUMBA_CACHE_DIR") or getattr(config, "CACHE_LOCATOR_CLASSES", "")):
    config.CACHE_LOCATOR_CLASSES = _PLACES  # type: ignore[attr-defined] # made when it is imported


def compile_lazily(function: Function) -> Function:
    """Return ``function``, which is compiled at its first call and can run in parallel threads.

    The machine code is kept in the user's cache (``LoopCache``), or in ``NUMBA_CACHE_DIR``. It is
    found by the file that contains the function. So a function must not call one that is compiled
    from another file. If nothing can be written, each process compiles again.
    """
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # there is no place to keep it
        compiled = numba.njit(nogil=True)(function)
    return cast(Function, compiled)


def as_fixed_array(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return a read-only, contiguous view (a copy if necessary) of ``array``.

    Numba compiles a function again for each combination of array layouts and writability. All
    arguments that a function only reads go through here, so that there is only one combination.
    """
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
