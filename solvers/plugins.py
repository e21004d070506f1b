"""The loading of plug-ins: it imports users' modules, and refuses what is neither scheduler nor objective."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.plugins import add_plugin, find_plugin, is_reference, references_in

_SCHEDULER_EXAMPLE: Final = "docs/examples/smallest_first.py is one"
_OBJECTIVE_EXAMPLE: Final = "docs/examples/most_jobs.py has one"


def load_scheduler(reference: str) -> None:
    """Import the scheduler ``reference``, e.g. ``my_lab.queues:SmallestFirst``, for this process.

    Nothing happens if it is loaded already. Modules are found on the import path and in the current
    folder. Never call this with a text from a client.

    Raises:
        InvalidInput: there is no such module or class, or the class is not a scheduler.
    """
    if find_plugin(reference) is None:
        scheduler = _import("scheduler", reference)
        require_scheduler(reference, scheduler)
        add_plugin(reference, scheduler)


def load_objectives(objective: str) -> None:
    """Import the plug-ins that an objective of the grammar names, for this process.

    It is otherwise as ``load_scheduler``. A class is called without arguments, and the result is
    the objective.

    Raises:
        InvalidInput: there is no such module or name, or it is not an objective.
    """
    for reference in references_in(objective):
        if find_plugin(reference) is None:
            values = _import("objective", reference)
            if inspect.isclass(values):
                values = _make("objective", reference, values)
            require_objective(reference, values)
            add_plugin(reference, values)


def load_named(scheduler: str, objective: str) -> None:
    """Import the plug-ins that the options of a round name, if they name any. Raises InvalidInput."""
    if is_reference(scheduler):
        load_scheduler(scheduler)
    load_objectives(objective)


def load_plugins(references: str) -> None:
    """Import plug-ins in a comma-separated list, e.g. those that a server's operator allows.

    A class with ``choose`` is a scheduler, and anything else an objective.

    Raises:
        InvalidInput: one of them cannot be imported, or is neither.
    """
    for reference in filter(None, (part.strip() for part in references.split(","))):
        if hasattr(_import("plugins", reference), "choose"):
            load_scheduler(reference)
        else:
            load_objectives(reference)


def require_kept_rules(scheduler: str, violations: Sequence[str]) -> None:
    """Refuse a scheduler's round in which the independent check found ``violations``.

    Raises:
        InvalidInput: there are some; the message has the first three.
    """
    if violations:
        more = f" (and {len(violations) - 3} more)" if len(violations) > 3 else ""
        raise InvalidInput(
            "scheduler", f"{scheduler} broke a rule: {'; '.join(violations[:3])}{more}"
        )


def module_files(*texts: str) -> tuple[Path, ...]:
    """Return the files of the loaded plug-ins that ``texts`` name, without repetition.

    Results that were kept for a plug-in are void if its file changes.
    """
    modules = (reference.partition(":")[0] for text in texts for reference in references_in(text))
    files = (getattr(sys.modules.get(module), "__file__", None) for module in modules)
    return tuple(dict.fromkeys(Path(file) for file in files if file))


def require_scheduler(reference: str, scheduler: object) -> None:
    """Refuse what is not a class of schedulers that can be made without arguments.

    Raises:
        InvalidInput: it is refused; the message says what is missing.
    """
    if not inspect.isclass(scheduler):
        raise InvalidInput(
            "scheduler", f"{reference} is not a class; name the class of a scheduler"
        )
    made = _make("scheduler", reference, scheduler)
    missing = [name for name in ("name", "choose") if not hasattr(made, name)]
    if missing:
        raise InvalidInput(
            "scheduler",
            f"{reference} has no {' and no '.join(missing)}; a scheduler has a name and a method"
            f" choose(seen), and {_SCHEDULER_EXAMPLE}",
        )
    if not isinstance(getattr(made, "name", None), str):
        raise InvalidInput("scheduler", f"{reference}.name must be a text, e.g. 'smallest-first'")
    _require_call("scheduler", f"{reference}.choose", getattr(made, "choose", None), "seen")


def require_objective(reference: str, values: object) -> None:
    """Refuse what cannot be called with a draft. Raises InvalidInput."""
    _require_call("objective", reference, values, "draft")


def _require_call(field: str, reference: str, function: object, argument: str) -> None:
    example = _SCHEDULER_EXAMPLE if field == "scheduler" else _OBJECTIVE_EXAMPLE
    if not callable(function):
        raise InvalidInput(field, f"{reference} cannot be called; it must be a function")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise InvalidInput(
            field,
            f"{reference} must take one argument, ({argument}), but {error}; {example}",
        ) from error
    except ValueError:  # a compiled function without a signature: its first call shows
        return


def _make(field: str, reference: str, cls: type) -> object:
    try:
        return cls()
    except TypeError as error:
        raise InvalidInput(
            field,
            f"{reference} must be made without arguments, but {error}; give its arguments defaults",
        ) from error


def _import(field: str, reference: str) -> object:
    """Return what ``reference`` names. An error of the module itself is not caught."""
    if not is_reference(reference):
        raise InvalidInput(field, f"{reference!r} must be MODULE:NAME, e.g. my_lab.queues:Smallest")
    module_name, _, name = reference.partition(":")
    try:
        with _current_folder_on_path():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        absent = error.name or ""
        if module_name != absent and not module_name.startswith(f"{absent}."):
            raise InvalidInput(
                field, f"{module_name} needs the module {absent!r}, which is not installed"
            ) from error
        raise InvalidInput(
            field,
            f"there is no module {absent!r}; it must be in the current folder or on PYTHONPATH",
        ) from error
    except SyntaxError as error:
        raise InvalidInput(field, f"{error.filename} line {error.lineno}: {error.msg}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        defined = sorted(
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", None) == module_name and not key.startswith("_")
        )
        raise InvalidInput(
            field, f"{module_name} has no {name!r}; it defines {', '.join(defined) or 'nothing'}"
        ) from None


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Find modules in the current folder, too, as `python -m` does."""
    here = str(Path.cwd())
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
