"""The one way in which loops are compiled: without the interpreter lock, kept on disk where that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Function = TypeVar("Function", bound=Callable[..., object])
Scalar = TypeVar("Scalar", bound=np.generic)


def jitted(function: Function) -> Function:
    """Return ``function`` compiled when first called; threads run it side by side.

    The machine code is kept beside the source, or in the user's cache where that cannot be written, or in
    ``NUMBA_CACHE_DIR``. Numba notices only changes of the file that a function stands in, so a function
    calls none that is compiled from another file. Where nothing can be written each process compiles anew.
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
