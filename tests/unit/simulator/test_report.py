"""Reports: the page, the Markdown, the plots, and the commit that a number comes from."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.figures import Report
from tessera.simulator.provenance import measured_commit
from tessera.simulator.report.comparisons import bars_plot
from tessera.simulator.report.gpu_map import Segment, gpu_map, job_colours, place_segments
from tessera.simulator.report.html import render_page
from tessera.simulator.report.lines import (
    distribution_plot,
    gap_plot,
    thin_steps,
    time_plot,
)
from tessera.simulator.report.model import (
    Plot,
    RunReport,
    Table,
    format_value,
    report_of,
)
from tessera.simulator.report.style import DARK, LIGHT, series_styles
from tessera.simulator.report.write import write_report
from tessera.simulator.statistics import Interval
from tests.support.laws import examples

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


@pytest.fixture(scope="module")
def source() -> str:
    """Return the page of a report, which takes a while to draw."""
    return render_page(a_report())


def test_the_page_is_self_contained(source: str) -> None:
    page = ParsedPage(source)
    assert not page.all("script") + page.all("link") + page.all("iframe")
    addresses = re.findall(r"https?://[^\s\"')]+", source)
    assert set(addresses) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in source


def test_the_page_contains_the_whole_report_and_escapes_it(source: str) -> None:
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


def test_the_page_describes_its_pictures_to_screen_readers(source: str) -> None:
    page = ParsedPage(source)
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


def test_ids_are_unique_though_pictures_are_alike(source: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', source)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', source))
    assert used <= set(ids)


def test_writing_a_report_twice_gives_the_same_page(tmp_path: Path) -> None:
    file = write_report(a_report(), tmp_path / "new" / "report")
    assert [path.name for path in file.parent.iterdir()] == ["report.html"]
    again = write_report(a_report(), tmp_path / "again")
    assert file.read_bytes() == again.read_bytes()


def test_the_result_of_a_case_becomes_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/tessera", "bench", "x", "--trace", "a b"])
    found = Report(seed=7, figures={"gain": 2.0}, table=[{"policy": "p", "jct_s": 1.0}])
    report = report_of(found, title="X", options={"trace": "a b"}, plots=[a_plot()])
    assert report.command == "tessera bench x --trace 'a b'"
    assert report.seeds == (7,)
    assert report.figures == {"gain": 2.0}
    assert report.tables[0].rows == (("p", 1.0),)
    assert report.commit == measured_commit()


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


POLICIES = [f"policy-{k}" for k in range(20)]


def legend_below(drawing: Figure, least_in: float = 2.4) -> bool:
    """Return whether the whole legend is below axes that keep at least ``least_in`` inches."""
    drawing.canvas.draw()
    [legend] = drawing.legends
    box, [axes] = legend.get_window_extent(), drawing.axes
    label = axes.xaxis.label.get_window_extent()
    # the legend took no room from the axes
    assert axes.get_window_extent().height / drawing.dpi >= least_in
    inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= drawing.bbox.x1
    return bool(inside and box.y1 <= label.y0 + 1)


@examples(60)
@given(
    lengths=st.lists(st.floats(0.1, 50), min_size=1, max_size=60),
    points=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_thinned_steps_keep_the_area(lengths: list[float], points: int, seed: int) -> None:
    edges = np.append(3.0, 3.0 + np.cumsum(lengths))
    values = np.random.default_rng(seed).uniform(0, 9, len(lengths))
    at_s, shown, coarse = thin_steps(edges[:-1], values, edges[-1], points)
    assert coarse == (len(lengths) > points)
    assert len(shown) <= points
    assert (at_s[0], at_s[-1]) == pytest.approx((edges[0], edges[-1]))
    assert shown @ np.diff(at_s) == pytest.approx(values @ np.diff(edges))
    assert values.min() - 1e-9 <= shown.min()
    assert shown.max() <= values.max() + 1e-9


def test_lines_of_twenty_policies_have_a_legend_that_covers_no_line() -> None:
    steps = (np.array([0.0, 50_000.0]), np.array([1.0, 3.0]))
    plot = time_plot("t", dict.fromkeys(POLICIES, steps), label="jobs", end_s=100_000.0)
    assert legend_below(plot.drawing)
    [axes] = plot.drawing.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (hours)", "jobs")
    assert "27.78 hours" in plot.alt
    assert "policy-19 2" in plot.alt


def test_unfinished_jobs_keep_a_distribution_below_1() -> None:
    plot = distribution_plot(
        "t",
        {"all": np.array([60.0, 3600.0]), "half": np.array([60.0, 90.0])},
        label="JCT",
        totals={"all": 2, "half": 4},
        seconds=True,
    )
    [axes] = plot.drawing.axes
    assert [np.asarray(line.get_ydata())[-1] for line in axes.lines] == [1.0, 0.5]
    assert "half 75 (2 of 4 jobs)" in plot.alt
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert shown == ["1 min", "10 min", "1 h"]


def test_rounds_without_a_bound_are_counted_not_drawn() -> None:
    rounds, gaps = np.arange(1, 6), np.array([0.0, 0.01, math.inf, math.nan, 0.2])
    plot = gap_plot("t", {"ilp": (rounds, gaps)})
    [line] = plot.drawing.axes[0].lines
    assert np.asarray(line.get_xdata()).tolist() == [1, 2, 5]
    assert plot.caption == "Rounds without a bound: ilp 2 of 5."
    assert "Largest: ilp 20 %" in plot.alt


def test_bars_are_placed_side_by_side_and_a_missing_one_leaves_a_gap() -> None:
    one = Interval(value=2.0, low=1.0, high=3.0)
    alone = Interval(value=4.0, low=math.nan, high=math.nan)
    series = {"optimum": {"ilp": one, "fcfs": alone}, "estimates": {"fcfs": one}}
    plot = bars_plot("t", series, label="JCT (s)")
    axes = plot.drawing.axes[0]
    boxes = [patch.get_path().get_extents(patch.get_patch_transform()) for patch in axes.patches]
    assert [box.width for box in boxes] == pytest.approx([2, 4, 2])
    spans = sorted((box.y0, box.y1) for box in boxes)
    assert all(low[1] <= high[0] for low, high in pairwise(spans))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ilp", "fcfs"]
    assert [text.get_text() for text in axes.texts] == ["2", "4", "2"]
    assert legend_below(plot.drawing, least_in=1.1)


def test_gpus_are_drawn_while_they_are_held() -> None:
    segments: list[Segment] = [("a", 0.0, 50.0, [(0, 1), (1, 2)]), ("b", 50.0, 100.0, [(1, 2)])]
    plot = gpu_map("t", segments, [2, 2], end_s=100.0, node_types=["A40", "H100"])
    [image] = plot.drawing.axes[0].images
    pixels = np.asarray(image.get_array())
    rows = pixels.reshape(4, -1, *pixels.shape[1:])[:, 0]  # one pixel row of each GPU
    colour = job_colours(["a", "b"])
    free = rows[1, 0]
    assert free[3] < 255
    for gpu, (first, second) in enumerate(
        [(colour["a"], free), (free, free), *[(colour["a"], colour["b"])] * 2]
    ):
        assert (rows[gpu, :500] == first).all()
        assert (rows[gpu, 500:] == second).all()
    assert "2 jobs hold 62.5 % of the GPU time" in plot.alt
    assert [text.get_text() for text in plot.drawing.axes[0].texts] == ["A40", "H100"]
    large = gpu_map("t", [("a", 0.0, 1.0, [(0, 8)])], [8] * 500, end_s=1.0)
    assert np.asarray(large.drawing.axes[0].images[0].get_array()).shape[0] <= 1600


def test_more_gpus_than_a_node_has_are_refused() -> None:
    segments: list[Segment] = [("a", 0.0, 5.0, [(1, 2)]), ("b", 4.0, 9.0, [(1, 1)])]
    with pytest.raises(InvalidInput, match="with b, hold more than the 2 GPUs of node 1 at 4 s"):
        place_segments(segments, [8, 2])


@examples(40)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    lengths=st.lists(st.floats(1, 9), min_size=6, max_size=6),
)
def test_no_gpu_is_drawn_for_two_jobs(counts: list[int], lengths: list[float]) -> None:
    nodes = [4, 2, 3]
    segments: list[Segment] = []
    for node, gpus in enumerate(nodes):
        until = [0.0] * gpus
        for k, want in enumerate(counts):
            start = sorted(until)[min(want, gpus) - 1]
            end = start + lengths[k]
            segments.append((f"{node}-{k}", start, end, [(node, min(want, gpus))]))
            until = sorted([*([end] * min(want, gpus)), *sorted(until)[min(want, gpus) :]])
    held_gpus = place_segments(segments, nodes)
    first = np.cumsum([0, *nodes])
    for one in held_gpus:
        node = int(one.job.split("-")[0])
        assert set(one.gpus) <= set(range(first[node], first[node + 1]))
        for other in held_gpus:
            if other is not one and other.start_s < one.end_s and one.start_s < other.end_s:
                assert not set(one.gpus) & set(other.gpus)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a repository with one module and one page."""
    (tmp_path / "module.py").write_text("A = 1\n", "utf-8")
    (tmp_path / "README.md").write_text("# A\n", "utf-8")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "One"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_a_clean_tree_is_its_commit(tree: Path) -> None:
    assert len(measured_commit(tree)) == 12


@pytest.mark.parametrize("name", ["module.py", "new.py", "service/new.py"])
def test_changed_and_new_modules_mark_the_commit(name: str, tree: Path) -> None:
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text("B = 2\n", "utf-8")
    assert measured_commit(tree).endswith("+")


@pytest.mark.parametrize(
    "name", ["README.md", "docs/results.md", "benchmarks/results/build.json", "notes.txt"]
)
def test_documents_stored_runs_and_new_notes_are_not_code(name: str, tree: Path) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("text\n", "utf-8")
    assert len(measured_commit(tree)) == 12


def test_outside_git_the_commit_is_unknown(tmp_path: Path) -> None:
    assert measured_commit(tmp_path) == "unknown"
