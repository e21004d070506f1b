"""Count what CONTRIBUTING's section "Language" asks for, and fail where a count is over its limit.

Names and phrases have a limit for each file, in ``style_limits.toml``, which may only fall:
``--lower`` lowers it. The other measures have one for the whole tree, which is near what we have
reached.
"""

from __future__ import annotations

import argparse
import ast
import gc
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stylerules import agentpaths, limits, prose
from stylerules.findings import StyleFinding
from stylerules.names import ModuleFacts, collect_facts
from stylerules.words import ADVICE, REFUSED_BY_GLOSSARY, rule_of

ROOT: Final = Path(__file__).resolve().parents[1]
LIMITS: Final = Path(__file__).with_name(limits.FILE_NAME)
ROOMS: Final = (
    "formulation/",
    "solvers/",
    "modelling/",
    "estimator/",
    "db/",
    "service/",
    "simulator/",
    "benchmarks/",
)
"""The rooms of the product."""
FOLDERS: Final = (*ROOMS, "tests/", "scripts/")
"""The folders whose docstrings and messages have limits for the whole tree."""
THINGS: Final = 3
"""A class name may stand for fewer different things than this."""
MAX_FOLDER_MODULES: Final = 25
"""The largest number of modules in a folder of the product or of scripts."""
FILES_ABOUT_STYLE: Final = (
    "CONTRIBUTING.md",
    "docs/glossary.md",
    "scripts/stylerules/prose.py",
    "scripts/stylerules/words.py",
    "tests/contract/test_style.py",
)
"""Files that must name the words and phrases that others may not use."""
GLOSSARY_REFUSES: Final = re.compile(r'[Nn]ot "(\w+)"')


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


@dataclass(frozen=True, slots=True)
class Tree:
    """The parts of all files that the rules read, by the path of the file."""

    modules: dict[str, ModuleFacts] = field(default_factory=dict)
    prose: dict[str, str] = field(default_factory=dict)
    """The prose of Markdown files."""
    protos: dict[str, str] = field(default_factory=dict)
    uses_of_paths: list[str] = field(default_factory=list)
    skips_of_format: list[str] = field(default_factory=list)

    def product(self) -> dict[str, ModuleFacts]:
        """Return the modules of the rooms."""
        return {path: facts for path, facts in self.modules.items() if path.startswith(ROOMS)}


def load_tree(root: Path, paths: Iterable[str]) -> Tree:
    """Return the facts of files. Each module is parsed once, and its syntax tree is dropped."""
    tree = Tree()
    gc.disable()  # syntax trees have no cycles, and many nodes
    for path in paths:
        text = (root / path).read_text(encoding="utf-8")
        if path.endswith(".py"):
            syntax = ast.parse(text)
            facts = collect_facts(path, syntax)
            if path not in FILES_ABOUT_STYLE:
                for line, string in (*facts.strings, *prose.comments_of(text)):
                    facts.findings += prose.find_phrases(path, line, string)
            tree.modules[path] = facts
            if not agentpaths.may_use_paths(path):
                tree.uses_of_paths.extend(agentpaths.find_uses(path, syntax))
            if path.startswith(ROOMS) and "# fmt: skip" in text:
                tree.skips_of_format.append(path)
        elif path.endswith(".proto"):
            tree.protos[path] = text
        else:
            tree.prose[path] = prose.prose_of(text)
    gc.enable()
    return tree


def written_files(root: Path) -> list[str]:
    """Return the modules, protos and documents that we write, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    patterns = ["*.py", "*.md", "*.proto"]
    listing = subprocess.run(
        [*command, *patterns], cwd=root, capture_output=True, text=True, check=True
    )
    return [
        path
        for path in sorted(set(listing.stdout.splitlines()))
        if not path.startswith("proto/gen/") and path != "CHANGELOG.md" and (root / path).is_file()
    ]


def find_all(tree: Tree) -> list[StyleFinding]:
    """Return all findings that have a limit in their file, in order."""
    findings = [finding for facts in tree.modules.values() for finding in facts.findings]
    for path, text in (*tree.prose.items(), *tree.protos.items()):
        if path not in FILES_ABOUT_STYLE:
            findings += prose.find_phrases(path, 1, text)
    findings += find_shared_class_names(tree.modules)
    return sorted(findings)


def find_shared_class_names(modules: Mapping[str, ModuleFacts]) -> Iterator[StyleFinding]:
    """Yield the classes whose name is also a class of another file. Examples share none."""
    homes: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, facts in modules.items():
        if not path.startswith("docs/"):
            for line, name in facts.classes:
                homes[name].append((path, line))
    for name, places in homes.items():
        for path, line in places:
            other_homes = sorted({home for home, _ in places if home != path})
            if other_homes:
                advice = f"{ADVICE['class_home']}; it is also in {', '.join(other_homes[:3])}"
                yield StyleFinding(path, line, "class_home", f"class {name!r}", advice)


def repeated_class_names(modules: Mapping[str, ModuleFacts]) -> list[str]:
    """Return the names that classes of ``THINGS`` or more modules have."""
    homes = Counter(
        name for facts in modules.values() for name in {name for _, name in facts.classes}
    )
    return sorted(name for name, count in homes.items() if count >= THINGS)


def crowded_folders(paths: Iterable[str]) -> list[str]:
    """Return the folders with more than ``MAX_FOLDER_MODULES`` modules. Tests may have more."""
    counts = Counter(
        path.rpartition("/")[0]
        for path in paths
        if not path.startswith("tests/") and not path.endswith("/__init__.py")
    )
    return [f"{folder}/ has {n}" for folder, n in sorted(counts.items()) if n > MAX_FOLDER_MODULES]


def unknown_glossary_words(text: str) -> list[str]:
    """Return the words that the glossary refuses and no rule knows."""
    return [word for word in GLOSSARY_REFUSES.findall(text) if word not in REFUSED_BY_GLOSSARY]


def percentage(part: int, total: int) -> float:
    """Return a part of a total in percent."""
    return 100.0 * part / max(total, 1)


def measures(tree: Tree) -> list[Measure]:
    """Return the measures that have a limit for the whole tree."""
    product = tree.product()
    functions = [name for facts in product.values() for name in facts.functions]
    participles = [name for name in functions if rule_of(name, "local") == "participle"]
    checked_modules = {p: facts for p, facts in tree.modules.items() if p.startswith(FOLDERS)}
    docstrings = [text for facts in checked_modules.values() for text in facts.docstrings]
    questions = [text.partition("\n")[0] for text in docstrings if prose.QUESTION.match(text)]
    strings = [(path, text) for path, facts in checked_modules.items() for _, text in facts.strings]
    texts = [*strings, *tree.protos.items(), *tree.prose.items()]
    texts = [(path, text) for path, text in texts if path not in FILES_ABOUT_STYLE]
    sizes_kb = {
        path: (ROOT / path).stat().st_size / 1000
        for path in tree.prose
        if path.endswith("README.md")
    }
    readme_kb = sizes_kb.pop("README.md")
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    none_allowed = (
        ("public functions named by a participle", participles),
        ("docstrings of modules and classes that open with a question", questions),
        ("banned words in strings, Markdown and protos", prose.banned_words(texts)),
        ("class names used for three things or more", repeated_class_names(product)),
        ("modules with lines that the formatter may not lay out", tree.skips_of_format),
        (f"folders of more than {MAX_FOLDER_MODULES} modules", crowded_folders(tree.modules)),
        ("lines of Markdown over 100 columns", prose.wide_lines(tree.prose)),
        ("links of Markdown that lead nowhere", prose.dead_links(ROOT, tree.prose)),
        ("uses of paths in the agent that are not in its files.py", tree.uses_of_paths),
        ("pages of decisions that their index lacks", prose.unlisted_decisions(ROOT)),
        ("words that the glossary refuses and no rule knows", unknown_glossary_words(glossary)),
    )
    sizes = (
        # the measure, its value, its limit
        (
            "public functions named by one word, %",
            percentage(sum("_" not in name for name in functions), len(functions)),
            5,
        ),
        ("README, kB", readme_kb, 8),
        ("largest README of a room, kB", max(sizes_kb.values()), 6),
    )
    return [
        *(
            Measure(name=name, value=len(places), limit=0, places=places)
            for name, places in none_allowed
        ),
        *(Measure(name=name, value=value, limit=limit) for name, value, limit in sizes),
    ]


def totals_by_rule(findings: Iterable[StyleFinding]) -> Iterator[str]:
    """Yield a line for each rule with its count over all files."""
    counts = Counter(finding.rule for finding in findings)
    for rule in ADVICE:
        yield f"{'all files, by their own limits: ' + rule:<66}{counts[rule]:>9}"


def main() -> int:
    """Print the table; return 1 where a measure is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lower", action="store_true", help="lower the limits of files to their counts"
    )
    arguments = parser.parse_args()
    tree = load_tree(ROOT, written_files(ROOT))
    table, findings = measures(tree), find_all(tree)
    errors = limits.check_limits(LIMITS, findings, is_to_lower=arguments.lower)
    rows = [f"{'measure':<66}{'now':>9}{'limit':>9}", *(measure.row() for measure in table)]
    sys.stdout.writelines(f"{row}\n" for row in (*rows, *totals_by_rule(findings), *errors))
    return int(bool(errors) or any(measure.value > measure.limit for measure in table))


if __name__ == "__main__":
    sys.exit(main())
