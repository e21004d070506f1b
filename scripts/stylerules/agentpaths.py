"""The agent opens, makes, changes and removes files in one module only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

AGENT: Final = "service/agent/"
PATHS_HOME: Final = "files.py"
"""The module of the agent that opens, makes, changes and removes files."""
PATHS_ELSEWHERE: Final = {
    "programs": "runs in the process of a job, as its user",
    "keeper/rank_program.py": "runs in the process of a job, as its user",
    "network/turns.py": "is for programs that ask for turns, in a directory that users share",
}
"""Other modules and folders of the agent that may do so, each with the reason."""
OS_PATH_CALLS: Final = re.compile(
    r"ch(?:dir|flags|mod|own|root)|fchdir|f?walk|lch(?:flags|mod|own)|link|makedirs|mkdir|mkfifo|mknod|p?open"
    r"|remove(?:dirs|xattr)?|renames?|replace|rmdir|setxattr|symlink|system|truncate|unlink"
    r"|utime|POSIX_SPAWN_OPEN"
)
"""The functions of os that open, make, change or remove a file, or enter a directory."""
PATH_METHODS: Final = re.compile(
    r"l?chmod|hardlink_to|mkdir|open|rename|rmdir|symlink_to|touch|unlink|(?:read|write)_(?:bytes|text)"
)
"""The methods of Path that do the same."""


def find_uses(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield the uses of paths in a module that only ``PATHS_HOME`` may have, each with its line.

    They are calls that open, make, change or remove a file, or enter a directory. A name
    that is imported, or a module under another name, counts as a use. Lists of names and statuses of
    files do not count.
    """
    owners = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="os" | "shutil" | "tempfile", names=names):
                uses = [name.name for name in names if name.name not in ("PathLike", "which")]
            case ast.Import(names=names):
                uses = [n.name for n in names if n.name in ("os", "shutil") and n.asname]
                uses += [n.name for n in names if n.name in ("posix", "tempfile")]
            case ast.Attribute(value=ast.Name(id="shutil"), attr=attr) if attr != "which":
                uses = [attr]
            case ast.Attribute(value=ast.Name(id="os"), attr=attr) if OS_PATH_CALLS.fullmatch(attr):
                uses = [attr]
            case ast.ImportFrom(module="builtins" | "io" | "pathlib" | "posix", names=names):
                uses = [n.name for n in names if n.name in ("open", "os") or node.module == "posix"]
            case ast.Name(id="open" | "__import__" as name):
                uses = [name]
            case ast.Name(id="os" | "shutil" as name) if (
                id(node) not in owners
            ):  # under another name
                uses = [name]
            case ast.keyword(arg="cwd"):
                uses = ["cwd"]
            case ast.Call(func=ast.Attribute(attr="replace", value=owner), args=[_], keywords=[]):
                uses = [] if isinstance(owner, ast.Name) and owner.id == "os" else ["replace"]
            case ast.Attribute(attr=attr) if PATH_METHODS.fullmatch(attr):
                uses = [attr]
            case _:
                continue
        for use in uses:
            yield f"{path}:{node.lineno}: {use}"


def may_use_paths(path: str) -> bool:
    """Return whether a file is outside of the agent, or is one that may do so."""
    if not path.startswith(AGENT):
        return True
    module = path.removeprefix(AGENT)
    return module in (PATHS_HOME, *PATHS_ELSEWHERE) or module.rpartition("/")[0] in PATHS_ELSEWHERE
