"""The one way in which loops are compiled: without the interpreter lock, kept on disk where that can be."""

from __future__ import annotations

import hashlib
import os
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
    """The place of a compiled function: a folder of the user's cache for each content of its source file.

    A second clone, or a copy that is installed later, finds what the first has compiled. Numba's own
    places go by the path and the age of the file.
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
        """Return the place of a function of ours; None where it is another's or cannot be written."""
        if not (py_func.__module__ or "").startswith("tessera."):
            return None
        try:
            found = cls(Path(py_file))
            found.ensure_cache_path()  # type: ignore[no-untyped-call] # Numba types none of it
        except OSError:
            return None
        return found

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """Return what changes with the source."""
        return self._digest

    def get_disambiguator(self) -> str:
        """Return nothing: a function's name and line tell it from others of its file."""
        return ""


@cache
def _digest(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


_PLACES: Final = f"{__name__}.{LoopCache.__name__},InTreeCacheLocator,UserWideCacheLocator"
"""Where Numba looks for a place, in order."""

if not (os.environ.get("NUMBA_CACHE_DIR") or getattr(config, "CACHE_LOCATOR_CLASSES", "")):
    config.CACHE_LOCATOR_CLASSES = _PLACES  # type: ignore[attr-defined] # made when it is imported


def jitted(function: Function) -> Function:
    """Return ``function`` compiled when first called; threads run it side by side.

    The machine code is kept in the user's cache (``LoopCache``), or in ``NUMBA_CACHE_DIR``. It is found by
    the file that a function stands in, so a function calls none that is compiled from another file. Where
    nothing can be written each process compiles again.
    """
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no place to keep it
        compiled = numba.njit(nogil=True)(function)
    return cast(Function, compiled)


def fixed(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return a read-only, contiguous view (a copy where it must be) of ``array``.

    A function is compiled anew for each combination of layouts and writability that it meets: arguments
    that it only reads all come through here, so that there is just one.
    """
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
