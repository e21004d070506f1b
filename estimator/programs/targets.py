"""Functions that users name as ``module:function``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tessera.estimator.graph import Untraceable


def function_of(target: str) -> Callable[..., Any]:
    """Return the function with the name ``module:function``.

    Raises:
        Untraceable: the name does not have that form, or there is no such function.
    """
    module_name, colon, function_name = target.partition(":")
    if not colon or not module_name or not function_name:
        raise Untraceable(f"{target!r} does not name a function; write it as module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise Untraceable(
            f"{target}: module {module_name} cannot be imported ({error}); install it or set PYTHONPATH"
        ) from error
    make = getattr(module, function_name, None)
    if not callable(make):
        raise Untraceable(
            f"{target}: {module_name} has no function {function_name}; check its name"
        )
    function: Callable[..., Any] = make
    return function


def check_call(target: str, make: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check that the function can be called with these keyword arguments.

    Raises:
        Untraceable: it cannot be called with them.
    """
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise Untraceable(f"{target}({', '.join(given)}) cannot be called: {error}") from error


def accepts_argument(make: Callable[..., Any], name: str) -> bool:
    """Return whether the function has a parameter of that name, or accepts any keyword."""
    parameters = inspect.signature(make).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)
