"""Count what CONTRIBUTING's section "Language" asks for, and fail where a count is over its limit.

Each measure has a limit, which is near what we have reached and may only fall.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
ROOMS: Final = (
    *(
        "formulation",
        "solvers",
        "modelling",
        "estimator",
        "db",
        "service",
        "simulator",
        "benchmarks",
    ),
)
"""The product: tests have sentences for names."""
COLUMNS: Final = 100
"""Columns of a line of Markdown outside of tables and code."""
THINGS: Final = 3
"""A class name may stand for fewer different things than this."""

PARTICIPLE: Final = re.compile(
    r"(?!(?:seed|need|speed|feed|embed|shed|bed)$)[a-z]+ed|held|told|known|found|seen|met|given|taken|kept|made"
    r"|done|sent|put|shown|said|bound|drawn|written|left|lost|built|spent|paid|chosen|begun|sought|meant|read"
)
LINK: Final = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
"""A link to a file of ours, without its anchor."""
NAMING_WHAT_IS_BANNED: Final = ("CONTRIBUTING.md", "glossary.md", "style.py")
QUESTION: Final = re.compile(r"(?:what|how|who|whom|whose|which|where|when|why)\b", re.IGNORECASE)
BANNED: Final = re.compile(
    r"\b(?:besides?|anew|so many|so long|told|hears?|come(?:s)? to|came to|(?-i:is none|are none)|for want of"
    r"|by itself|by themselves|whom|stands? in)\b",
    re.IGNORECASE,
)


PATHS_HOME: Final = "files.py"
"""The module of the agent that opens, makes, changes and removes what has a path."""
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
"""The functions of os that open, make, change or remove what has a path, or enter a directory."""
PATH_METHODS: Final = re.compile(
    r"l?chmod|hardlink_to|mkdir|open|rename|rmdir|symlink_to|touch|unlink|(?:read|write)_(?:bytes|text)"
)
"""The methods of Path that do the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A count or share with its limit."""

    name: str
    value: float
    limit: float
    places: Sequence[str] = ()
    """The places that were counted, shown where the value is over its limit."""

    def row(self) -> str:
        """Return a line of the table, and a line for each place to mend."""
        mark = "  over its limit" if self.value > self.limit else ""
        places = [f"\n  {place}" for place in self.places] if mark else []
        return f"{self.name:<66}{self.value:>9.4g}{self.limit:>9.4g}{mark}{''.join(places)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of the product: its path, its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module


def load_modules(*folders: str) -> list[Module]:
    """Return the modules of folders, without those that nobody wrote."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [(path, path.read_text(encoding="utf-8")) for path in paths]
    return [Module(path=path, text=text, tree=ast.parse(text)) for path, text in texts]


def public_functions(modules: Iterable[Module]) -> list[str]:
    """Return the names of all public functions of modules."""
    return [
        node.name
        for module in modules
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    ]


def docstrings(modules: Iterable[Module]) -> list[str]:
    """Return the docstrings of all modules and classes."""
    nodes = [
        node
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef)
    ]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def repeated_class_names(modules: Iterable[Module]) -> list[str]:
    """Return the names that classes of ``THINGS`` or more modules have."""
    homes: dict[str, set[Path]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(module.path)
    return sorted(name for name, paths in homes.items() if len(paths) >= THINGS)


def texts_of(modules: Iterable[Module]) -> Iterator[tuple[Path, str]]:
    """Yield every string of the product, docstrings and messages, with its module."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield module.path, node.value


def load_documents() -> dict[Path, str]:
    """Return the prose of the Markdown files that we write, without tables and code."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("proto/*.md")]
    found += [path for room in (*ROOMS, "tests") for path in (ROOT / room).rglob("*.md")]
    return {
        path: "\n".join(prose_of(path.read_text(encoding="utf-8")))
        for path in sorted(found)
        if path.name != "CHANGELOG.md"
    }


def prose_of(text: str) -> Iterator[str]:
    """Yield the lines of a Markdown text outside of tables and code."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "|")):
            yield line


def banned_words(modules: Iterable[Module], prose: Mapping[Path, str]) -> list[str]:
    """Return the banned words in strings, Markdown and protos, each with its file."""
    protos = [(path, path.read_text(encoding="utf-8")) for path in ROOT.glob("proto/**/*.proto")]
    return [
        f"{path.relative_to(ROOT)}: {found.group()!r} in {line.strip()!r}"
        for path, text in (*texts_of(modules), *protos, *prose.items())
        if path.name not in NAMING_WHAT_IS_BANNED
        for line in text.splitlines()
        for found in BANNED.finditer(line)
    ]


def wide_lines(prose: Mapping[Path, str]) -> list[str]:
    """Return the lines of Markdown that are too wide, each with its file."""
    return [
        f"{path.relative_to(ROOT)}: {line}"
        for path, text in prose.items()
        for line in text.splitlines()
        if len(line) > COLUMNS
    ]


def dead_links(prose: Mapping[Path, str]) -> list[str]:
    """Return the relative links of Markdown files that lead to no file."""
    return [
        f"{path.relative_to(ROOT)}: {target}"
        for path, text in prose.items()
        for target in LINK.findall(text)
        if not (path.parent / target).exists()
    ]


def unlisted_decisions() -> list[str]:
    """Return the pages of decisions that their index does not list by their title."""
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text(encoding="utf-8")
    pages = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("2*.md")}
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in pages.items()}
    return [name for name, title in titles.items() if f"[{title}]({name})" not in index]


def share(part: int, whole: int) -> float:
    """Return a part of a whole in percent."""
    return 100.0 * part / max(whole, 1)


def uses_of_paths(module: Module) -> Iterator[str]:
    """Yield the uses of paths in a module that only ``PATHS_HOME`` may have, each with its line.

    They are calls that open, make, change or remove what has a path, or enter a directory. A name
    that is imported, or a module under another name, counts as a use. Lists of names and statuses of
    files are none.
    """
    owners = {id(n.value) for n in ast.walk(module.tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(module.tree):
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
            yield f"{module.path.relative_to(ROOT)}:{node.lineno}: {use}"


def uses_of_paths_in_agent() -> list[str]:
    """Return the uses of paths in the agent, outside of the module that owns them."""
    agent = ROOT / "service" / "agent"
    exempt = {agent / name for name in (PATHS_HOME, *PATHS_ELSEWHERE)}
    modules = [
        module
        for module in load_modules("service/agent")
        if not exempt & {module.path, module.path.parent}
    ]
    return [use for module in modules for use in uses_of_paths(module)]


def measures() -> list[Measure]:
    """Return all measures of the tree."""
    modules = load_modules(*ROOMS)
    written = [*modules, *load_modules("tests", "scripts")]
    names, texts = public_functions(modules), docstrings(written)
    participles = [name for name in names if PARTICIPLE.fullmatch(name)]
    questions = [text.partition("\n")[0] for text in texts if QUESTION.match(text)]
    one_word = sum("_" not in name for name in names)
    prose = load_documents()
    sizes_kb = {path: path.stat().st_size / 1000 for path in prose if path.name == "README.md"}
    readme_kb = sizes_kb.pop(ROOT / "README.md")
    skips = [
        str(module.path.relative_to(ROOT)) for module in modules if "# fmt: skip" in module.text
    ]
    none_allowed = (
        ("public functions named by a participle", participles),
        ("docstrings of modules and classes that open with a question", questions),
        ("banned words in strings, Markdown and protos", banned_words(written, prose)),
        ("class names used for three things or more", repeated_class_names(modules)),
        ("modules with lines that the formatter may not lay out", skips),
        ("lines of Markdown over 100 columns", wide_lines(prose)),
        ("links of Markdown that lead nowhere", dead_links(prose)),
        ("uses of paths in the agent that are not in its files.py", uses_of_paths_in_agent()),
        ("pages of decisions that their index lacks", unlisted_decisions()),
    )
    sized = (
        # what is measured, its value, its limit
        ("public functions named by one word, %", share(one_word, len(names)), 5),
        ("README, kB", readme_kb, 8),
        ("largest README of a room, kB", max(sizes_kb.values()), 6),
    )
    return [
        *(
            Measure(name=name, value=len(places), limit=0, places=places)
            for name, places in none_allowed
        ),
        *(Measure(name=name, value=value, limit=limit) for name, value, limit in sized),
    ]


def main() -> int:
    """Print the table; return 1 where a measure is over its limit."""
    table = measures()
    sys.stdout.write(f"{'measure':<66}{'now':>9}{'limit':>9}\n")
    sys.stdout.write("\n".join(measure.row() for measure in table) + "\n")
    return int(any(measure.value > measure.limit for measure in table))


if __name__ == "__main__":
    sys.exit(main())
