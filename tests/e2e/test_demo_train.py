"""The demonstration of training, with real processes, of programs that need no PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S


@pytest.mark.slow
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
    rows = re.findall(r"^ *(line|plain-\d) +succeeded +(\d+)/(\d+) +([0-9→]+) ", done.stdout, re.M)
    assert [(name, steps) for name, steps, _, _ in rows] == [
        ("line", "100"),
        ("plain-1", "50"),
        ("plain-2", "50"),
        ("plain-3", "50"),
    ]
    sizes = rows[0][3].split("→")
    assert len(sizes) > 1, "line was scaled"
    assert len(set(sizes)) > 1
    assert "FAULT" not in done.stdout
    assert (tmp_path / "tessera-demo-train.png").read_bytes().startswith(b"\x89PNG")
