"""The page of results, ``docs/results.md``, which is rendered from stored runs of benchmarks.

``python -m tessera.benchmarks.harness.results`` writes the page. ``--check`` compares it with what the
stored runs give, and lists the old ones, whose code has changed since. ``run NAME ...`` stores runs
of the commands that have these names. Where ``README.md`` has the two comments around the page's
headlines, it gets the same headlines.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from jinja2 import Environment, StrictUndefined

from tessera.benchmarks.harness.stored import (
    COMMANDS,
    FOLDER,
    NotStored,
    StoredRun,
    load_commands,
    load_runs,
    store_run,
)

TEMPLATE: Final = FOLDER / "results.md.jinja"
PAGE: Final = FOLDER.parents[1] / "docs" / "results.md"
README: Final = FOLDER.parents[1] / "README.md"
HEADLINES: Final = re.compile(r"<!-- headlines -->\n.*?<!-- /headlines -->\n", re.DOTALL)
"""The part of the page that the README may repeat."""
PROGRAM: Final = "python -m tessera.benchmarks.harness.results"


def render_page(template: str, commands: Mapping[str, str], runs: Mapping[str, StoredRun]) -> str:
    """Return the page that a template makes of the stored runs, of which it marks the old ones.

    A key that a run does not have is an error, and so is a command that the template never quotes.
    """
    if unquoted := sorted(name for name in commands if f'"{name}"' not in template):
        raise NotStored(
            f"{TEMPLATE.name} never quotes {', '.join(unquoted)}: add a row, or remove the command"
        )
    environment = Environment(
        autoescape=False,  # noqa: S701 (the page is Markdown)
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    old = {name for name, run in runs.items() if run.changed_packages()}
    return environment.from_string(template).render(commands=commands, runs=runs, old=old)


def repeat_headlines(readme: str, page: str) -> str:
    """Return the README with the page's headlines between its comments, if it has these."""
    headlines = HEADLINES.search(page)
    if headlines is None:
        raise NotStored(f"{TEMPLATE.name} has no headlines: put them between the two comments")
    return HEADLINES.sub(lambda _: headlines[0], readme)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page, or store runs; return the exit status."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Render docs/results.md.")
    parser.add_argument("--check", action="store_true", help="Fail if the page is not up to date.")
    parser.add_argument("action", nargs="?", choices=["run"], help="Store runs, then render.")
    parser.add_argument("names", nargs="*", help=f"Names of commands in {COMMANDS.name}.")
    asked = parser.parse_args(arguments)
    try:
        commands = load_commands()
        for name in asked.names:
            if name not in commands:
                raise NotStored(f"{COMMANDS.name} has no command {name!r}: add it first")
            run = store_run(name, commands[name])
            sys.stderr.write(f"{name}: stored, at {run.commit}, {run.cpu_s} s of processor time\n")
        runs = load_runs(commands)
        page = render_page(TEMPLATE.read_text("utf-8"), commands, runs)
        texts = {PAGE: page, README: repeat_headlines(README.read_text("utf-8"), page)}
    except NotStored as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if asked.check:
        for name, run in runs.items():
            if changed := run.changed_packages():
                sys.stdout.write(f"old: {name}, at {run.commit}; changed: {', '.join(changed)}\n")
    stale = [path for path, text in texts.items() if _text_of(path) != text]
    if asked.check and stale:
        names = " and ".join(path.name for path in stale)
        sys.stderr.write(
            f"error: the figures of {names} are not those of the stored runs:"
            f" run `{PROGRAM}` and commit what it writes\n"
        )
        return 1
    for path in stale:
        path.write_text(texts[path], "utf-8")
    return 0


def _text_of(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
