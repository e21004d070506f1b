"""The demonstration of training, with real processes, of programs that need no PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.service.cli.demo.train.command import train
from tessera.service.cli.demo.train.fleet import virtual_fleet
from tessera.service.cli.demo.train.jobs import choose_jobs
from tests.support.patience import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.night  # it trains for minutes; test_replans.py and test_training_programs.py change plans, too
def test_the_demo_trains_jobs_that_rounds_scale_and_move(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TESSERA_")}
    options = ("--torch-python", "none", "--iterations", "100")
    done = subprocess.run(
        [sys.executable, "-m", "tessera.service.cli.main", "demo-train", *options],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "There is no PyTorch here" in done.stderr
    rows = re.findall(r"^ *([a-z-]+\d?) +succeeded +(\d+)/(\d+) ", done.stdout, re.M)
    half = [
        (name, "50", "50") for name in ("moe-jax", "resnet-jax", "plain-1", "plain-2", "plain-3")
    ]
    assert rows == [("gpt-jax", "100", "100"), *half]
    plans = "".join(done.stdout.split())  # a cell of the table may have several lines
    assert "dp4→2xtp2" in plans, "data parallelism became a pipeline"
    assert "→dp1" in plans, "the pipeline gave GPUs back"
    assert "FAULT" not in done.stdout
    assert (tmp_path / "tessera-demo-train.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.night  # it trains for minutes
def test_on_one_gpu_jobs_take_turns_and_a_drain_stops_all_of_them() -> None:
    fleet = virtual_fleet(nodes=1, node_gpus=1)
    lead, *others = choose_jobs(fleet, has_jax=True, has_torch=False)
    plain = next(job for job in others if job.name == "plain-1")
    first, second = train(fleet, (lead, plain), 100, None, EXAMPLES)[0]
    assert [*first.faults, *second.faults] == []
    assert len(first.starts) == 3, "it was suspended for the other job, and then by the drain"
    assert len(second.starts) == 1
