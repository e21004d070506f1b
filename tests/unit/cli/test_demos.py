"""The pure parts of the demonstration: its picture and its last lines."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tessera.service.cli.demo import command as demo
from tessera.service.cli.demo.picture import FREE_BRIGHTNESS, RoundPair, draw_picture, gpu_image
from tessera.v1 import jobs_pb2, scheduler_pb2

NODES = [("a", "a100", 4), ("b", "v100", 2)]


def a_decision(job: str, node: str = "", *gpus: int, kind: str = "keep") -> scheduler_pb2.Decision:
    decision = scheduler_pb2.Decision(job=f"clusters/c/jobs/{job}", kind=kind)
    if node:
        share = jobs_pb2.NodeShare(node=f"clusters/c/nodes/{node}", gpu_indices=gpus)
        decision.allocation.shares.append(share)
    return decision


def test_each_gpu_has_the_colour_of_its_job_in_the_last_round(tmp_path: Path) -> None:
    decisions = [
        a_decision("one", "a", 0, 1),
        a_decision("two", "b", 1, kind="start"),
        a_decision("three", kind="wait"),
    ]
    image, strips = gpu_image(decisions, NODES)
    free = np.full(3, FREE_BRIGHTNESS)
    assert [label for label, _ in strips] == ["a100: 4 GPUs", "v100: 2 GPUs"]
    assert np.array_equal(image[0, 0], image[1, 0])
    assert not np.array_equal(image[0, 0], free)
    assert np.array_equal(image[2, 0], free)
    assert np.array_equal(image[0, 2], free)
    assert not np.array_equal(image[1, 2], free)
    assert not np.array_equal(image[1, 2], image[0, 0])
    file, value = tmp_path / "demo.png", scheduler_pb2.Round(placed_score=2.0, running=1, waiting=1)
    draw_picture(file, [RoundPair(ilp=value, greedy=value, call_s=0.1)], decisions, NODES)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_demo_ends_with_commands_to_try_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(demo, "out", Console(file=shown, width=200))
    greedy = scheduler_pb2.Round(placed_score=2.0, gap=0.6, bound_is_trivial=True)
    exact = scheduler_pb2.Round(name="clusters/c/rounds/1", placed_score=2.5, gap=1e-5)

    demo._show([RoundPair(ilp=exact, greedy=greedy, call_s=0.1)], [], tmp_path / "p.png")

    lines = shown.getvalue().splitlines()
    after = lines[lines.index("Next steps:") + 1 :]
    assert after[0].split()[:2] == ["tessera", "up"]
