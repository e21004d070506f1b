"""Plots of reports: they show what was measured."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tessera.formulation.errors import InvalidInput
from tessera.simulator.report.comparisons import bars_plot
from tessera.simulator.report.gpu_map import Segment, gpu_map, job_colours, place_segments
from tessera.simulator.report.lines import (
    distribution_plot,
    gap_plot,
    thin_steps,
    time_plot,
    time_unit,
    worst_of_groups,
)
from tessera.simulator.report.pictures import render_png
from tessera.simulator.report.style import series_styles
from tessera.simulator.statistics import Interval
from tests.support.laws import examples

POLICIES = [f"policy-{k}" for k in range(20)]


def legend_below(drawing: Figure, least_in: float = 2.4) -> bool:
    """Return whether the whole legend is below axes that keep at least ``least_in`` inches."""
    assert render_png(drawing).startswith(b"\x89PNG")
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


def test_steps_after_the_end_are_not_drawn() -> None:
    at_s, shown, _ = thin_steps(np.array([0.0, 5.0, 10.0]), np.array([1.0, 2.0, 3.0]), 10.0)
    assert (at_s.tolist(), shown.tolist()) == ([0, 5, 10], [1, 2])


def test_lines_of_twenty_policies_have_a_legend_that_covers_no_line() -> None:
    steps = (np.array([0.0, 50_000.0]), np.array([1.0, 3.0]))
    plot = time_plot("t", dict.fromkeys(POLICIES, steps), label="jobs", end_s=100_000.0)
    assert legend_below(plot.drawing)
    [axes] = plot.drawing.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (hours)", "jobs")
    assert "27.78 hours" in plot.alt
    assert "policy-19 2" in plot.alt


def test_means_are_labelled_as_means() -> None:
    many = (np.arange(1000.0), np.ones(1000))
    assert (
        time_plot("t", {"a": many}, label="x", end_s=1000.0).caption
        == "Each value is a mean over 2 s."
    )
    assert time_plot("t", {"a": (many[0][:9], many[1][:9])}, label="x", end_s=9.0).caption == ""


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


def test_a_distribution_of_many_jobs_keeps_its_ends() -> None:
    values = np.random.default_rng(1).exponential(100, 5000)
    [line] = distribution_plot("t", {"a": values}, label="x").drawing.axes[0].lines
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert len(x) <= 400
    assert (x[0], x[-1]) == (values.min(), values.max())
    assert y[-1] == 1
    assert y == pytest.approx([np.mean(values <= at) for at in x])


def test_a_policy_that_finished_nothing_is_in_the_legend() -> None:
    plot = distribution_plot(
        "t", {"a": np.array([1.0, 2.0]), "none": np.zeros(0)}, label="x", totals={"a": 2, "none": 2}
    )
    assert "none none (0 of 2 jobs)" in plot.alt
    assert legend_below(plot.drawing)


def test_rounds_without_a_bound_are_counted_not_drawn() -> None:
    rounds, gaps = np.arange(1, 6), np.array([0.0, 0.01, math.inf, math.nan, 0.2])
    plot = gap_plot("t", {"ilp": (rounds, gaps)})
    [line] = plot.drawing.axes[0].lines
    assert np.asarray(line.get_xdata()).tolist() == [1, 2, 5]
    assert plot.caption == "Rounds without a bound: ilp 2 of 5."
    assert "Largest: ilp 20 %" in plot.alt


def test_of_many_rounds_the_worst_of_each_few_is_drawn() -> None:
    gaps = np.array([1.0, 9.0, 2.0, 3.0, 8.0, 0.0, 7.0])
    at, largest, few = worst_of_groups(np.arange(10, 17), gaps, points=3)
    assert (at.tolist(), largest.tolist(), few) == ([11, 14, 16], [9, 8, 7], 3)
    assert worst_of_groups(np.arange(2), np.ones(2), points=3)[2] == 1
    assert (
        "largest gap of up to 3 rounds"
        in gap_plot("t", {"a": (np.arange(1000), np.ones(1000))}).caption
    )


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


def test_series_keep_their_colour_from_plot_to_plot() -> None:
    looks = series_styles(["a", "b", "c"])
    steps = (np.zeros(1), np.ones(1))
    few = time_plot("t", {"c": steps}, label="x", end_s=1.0, styles=looks)
    assert few.drawing.axes[0].patches[0].get_edgecolor()[:3] == pytest.approx(
        [int(looks["c"].colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    )


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


def test_a_continuing_job_keeps_its_gpus_in_the_plot() -> None:
    segments: list[Segment] = [
        ("a", 0.0, 5.0, [(0, 1)]),
        ("b", 0.0, 10.0, [(0, 1)]),
        ("b", 10.0, 20.0, [(0, 1)]),
        ("c", 10.0, 20.0, [(0, 2)]),
    ]
    found = {(h.job, h.start_s): h.gpus.tolist() for h in place_segments(segments, [3])}
    assert found["b", 0.0] == found["b", 10.0] == [1]
    assert found["c", 10.0] == [0, 2]


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


def test_a_large_cluster_is_drawn_in_fewer_rows() -> None:
    plot = gpu_map("t", [("a", 0.0, 1.0, [(0, 8)])], [8] * 500, end_s=1.0)
    assert np.asarray(plot.drawing.axes[0].images[0].get_array()).shape[0] <= 1600


@pytest.mark.parametrize(
    ("longest_s", "unit"),
    [(100.0, "s"), (1000.0, "minutes"), (11_000.0, "hours"), (300_000.0, "days")],
)
def test_times_are_shown_in_a_unit_that_fits(longest_s: float, unit: str) -> None:
    assert time_unit(longest_s)[1] == unit
