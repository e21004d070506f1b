"""Reports: the contents of the page and the Markdown, and the format of values."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.simulator.figures import Report
from tessera.simulator.provenance import measured_commit
from tessera.simulator.report.html import render_page
from tessera.simulator.report.lines import time_plot
from tessera.simulator.report.markdown import render_markdown, table_lines
from tessera.simulator.report.model import (
    Plot,
    RunReport,
    Table,
    format_value,
    report_of,
    run_versions,
)
from tessera.simulator.report.style import DARK, LIGHT, series_styles
from tessera.simulator.report.write import write_report

VOID = {"meta", "br", "link", "img"}


class ParsedPage(HTMLParser):
    """The elements of a page, which must be properly nested."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def a_plot(title: str = "Queue <length>", **series: list[float]) -> Plot:
    """Return a plot of values at 0 s, 10 s, ... until 100 s."""
    steps = {
        name: (10.0 * np.arange(len(values)), np.array(values))
        for name, values in (series or {"ilp": [1.0, 5.0], "fcfs": [2.0, 3.0]}).items()
    }
    return time_plot(title, steps, label="jobs [waiting]", end_s=100.0, caption="No restarts.")


def a_report(**more: Any) -> RunReport:
    report = RunReport(
        title="Policies & loads",
        summary="All < 1.",
        command="tessera bench policies --seeds 2",
        commit="abc123+",
        seeds=(3, 4),
        versions={"python": "3.11.7"},
        options={"loads": [0.5, 1.0], "trace": None},
        figures={"jct_gain": 1.2345678, "rank": 1, "bound": math.inf},
        tables=(
            Table.from_rows(
                "Results",
                [
                    {"policy": "a|<b>", "jct_s": 1234.5, "ok": True},
                    {"policy": "c", "jct_s": None, "ok": False},
                ],
                "All jobs.",
            ),
        ),
        plots=(a_plot(), a_plot("Queue again")),
        notes=("FCFS > expected.",),
    )
    return replace(report, **more)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "\u2013"),
        (math.nan, "\u2013"),
        (math.inf, "∞"),
        (-math.inf, "\u2212∞"),
        (True, "yes"),
        (False, "no"),
        (12345, "12,345"),
        (12345.6, "12,346"),
        (1.23456, "1.235"),
        (-0.00012346, "\u22120.0001235"),
        (-4321.0, "\u22124,321"),
        ("x-y", "x-y"),
        (0.0, "0"),
    ],
)
def test_values_are_formatted_for_people(value: object, expected: str) -> None:
    assert format_value(value) == expected


def test_the_page_is_self_contained() -> None:
    source = render_page(a_report())
    assert (
        not ParsedPage(source).all("script")
        + ParsedPage(source).all("link")
        + ParsedPage(source).all("iframe")
    )
    addresses = re.findall(r"https?://[^\s\"')]+", source)
    assert set(addresses) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in source


def test_the_page_contains_the_whole_report_and_escapes_it() -> None:
    source = render_page(a_report())
    for held in (
        "Policies &amp; loads",
        "All &lt; 1.",
        "tessera bench policies --seeds 2",
        "abc123+",
        "seeds 3, 4",
        "3.11.7",
        "0.5, 1.0",
        "1.235",
        "∞",
        "a|&lt;b&gt;",
        "FCFS &gt; expected.",
        "Queue &lt;length&gt;",
        "No restarts.",
        "All jobs.",
    ):
        assert held in source


def test_the_page_describes_its_pictures_to_screen_readers() -> None:
    page = ParsedPage(render_page(a_report()))
    html = page.all("html")[0]
    assert html["lang"] == "en"
    pictures = page.all("svg")
    assert [picture["role"] for picture in pictures] == ["img", "img"]
    for picture in pictures:
        assert "Means: ilp 4.6, fcfs 2.9" in (picture["aria-label"] or "")
    headers = page.all("th")
    assert {header.get("scope") for header in headers} == {"col", "row"}
    targets = {a.get("id") for _, a in page.found}
    links = page.all("a")
    assert links
    assert all((link["href"] or "#")[1:] in targets for link in links)


def test_numbers_of_the_contents_have_room_in_every_column() -> None:
    """Padding on the list's left serves only its first column; other numbers would overlap a column."""
    source = render_page(a_report())
    contents = re.search(r"nav ol \{([^}]*)\}", source)
    entry = re.search(r"nav li \{([^}]*)\}", source)

    assert contents is not None
    assert entry is not None
    assert "columns" in contents[1]
    assert "padding: 0;" in contents[1]
    assert float(re.findall(r"margin-left: ([0-9.]+)rem", entry[1])[0]) > 2


def test_ids_are_unique_though_pictures_are_alike() -> None:
    ids = re.findall(r'\bid="([^"]+)"', render_page(a_report()))
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', render_page(a_report())))
    assert used <= set(ids)


def test_pictures_follow_the_theme() -> None:
    source = render_page(a_report())
    svgs = source[source.index("<svg") : source.rindex("</svg>")]
    assert "var(--s0)" in svgs
    assert "var(--ink)" in svgs
    assert not [colour for colour in LIGHT.values() if colour in svgs]
    for name, colour in DARK.items():
        assert f"--{name}:{colour}" in source


def test_markdown_holds_all_of_the_report() -> None:
    source = render_markdown(a_report(), ["one.png", "two.png"])
    for held in (
        "# Policies & loads",
        "`abc123+`, seeds 3, 4",
        "tessera bench policies --seeds 2",
        "| jct_gain | 1.235 |",
        "FCFS > expected.",
        "![Lines of jobs (waiting) over",
        "(one.png)",
        "(two.png)",
        "No restarts.",
        "| a\\|<b> | 1,234 | yes |",
        "| c | \u2013 | no |",
        "All jobs.",
        "| python | 3.11.7 |",
        "| option trace | none |",
    ):
        assert held in source


def test_markdown_tables_align_numbers_to_the_right() -> None:
    lines = table_lines(("policy", "jct_s", "ok"), [("a", 1.5, True), ("b", None, False)])
    assert lines[1] == "| --- | ---: | --- |"


def test_rows_with_other_keys_share_a_table() -> None:
    table = Table.from_rows("t", [{"a": 1}, {"b": 2, "a": 3}])
    assert table.columns == ("a", "b")
    assert table.rows == ((1, ""), (3, 2))


def test_an_empty_report_is_still_a_page() -> None:
    bare = a_report(figures={}, tables=(), plots=(), notes=(), summary="", options={})
    ParsedPage(render_page(bare))
    assert "## Figures" not in render_markdown(bare, [])


def test_writing_a_report_twice_gives_the_same_files(tmp_path: Path) -> None:
    file = write_report(a_report(), tmp_path / "new" / "report")
    names = sorted(path.name for path in file.parent.iterdir())
    assert names == ["01-queue-length.png", "02-queue-again.png", "report.html", "report.md"]
    again = write_report(a_report(), tmp_path / "again")
    for name in names:
        assert (file.parent / name).read_bytes() == (again.parent / name).read_bytes()
    for name in names[:2]:
        assert f"]({name})" in (file.parent / "report.md").read_text()


def test_the_result_of_a_case_becomes_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/tessera", "bench", "x", "--trace", "a b"])
    found = Report(seed=7, figures={"gain": 2.0}, table=[{"policy": "p", "jct_s": 1.0}])
    report = report_of(found, title="X", options={"trace": "a b"}, plots=[a_plot()])
    assert report.command == "tessera bench x --trace 'a b'"
    assert report.seeds == (7,)
    assert report.figures == {"gain": 2.0}
    assert report.tables[0].rows == (("p", 1.0),)
    assert report.commit == measured_commit()


def test_versions_name_python_the_machine_and_the_solvers() -> None:
    versions = run_versions()
    assert {"machine", "python", "tessera", "numpy", "ortools"} <= set(versions)
    assert versions["numpy"] == np.__version__


MACHADO = {  # severity 1, Machado, Oliveira and Fernandes 2009, on linear RGB
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear_rgb(colour: str) -> np.ndarray:
    shares = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    found: np.ndarray = np.where(
        shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4
    )
    return found


def lab(rgb: np.ndarray) -> np.ndarray:
    """Return the CIE L*a*b* values of linear RGB."""
    x, y, z = (
        np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116
        for v in XYZ @ rgb.clip(0, 1) / XYZ.sum(axis=1)
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(XYZ[1] @ linear_rgb(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("sight", list(MACHADO))
def test_series_are_distinguishable_with_any_colour_vision(
    theme: dict[str, str], sight: str
) -> None:
    colours = [lab(MACHADO[sight] @ linear_rgb(theme[f"s{k}"])) for k in range(7)]
    assert min(np.linalg.norm(a - b) for a, b in combinations(colours, 2)) >= 20


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_everything_has_enough_contrast_with_the_page(theme: dict[str, str]) -> None:
    for k in range(7):
        assert contrast(theme[f"s{k}"], theme["page"]) >= 3
    for words in ("ink", "muted"):
        assert contrast(theme[words], theme["page"]) >= 4.5


def test_twenty_policies_look_different_and_keep_their_look_in_every_plot() -> None:
    styles = series_styles([f"p{k}" for k in range(20)], bold=["p3"])
    assert len({(s.colour, str(s.dash)) for s in styles.values()}) == 20
    assert [name for name, s in styles.items() if s.bold] == ["p3"]
