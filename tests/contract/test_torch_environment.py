"""The script that makes the environment with PyTorch installs a build for CPUs, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = """#!/bin/sh
# A Python whose pip would install the packages of plan.json, and notes what it is asked.
folder=$(dirname "$0")
echo "$*" >> "$folder/asked"
case "$*" in
  *--dry-run*) cat "$folder/plan.json" ;;
  "-m pip"*) touch "$folder/installed" ;;
  *) test -e "$folder/installed" ;;
esac
"""


class Checkout:
    """A copy of the script with an environment whose pip is a double."""

    def __init__(self, folder: Path, packages: tuple[str, ...]) -> None:
        for name in ("scripts/torch_env.py", "requirements/torch.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.folder, self.bin = folder, folder / "build" / "torch" / "bin"
        self.bin.mkdir(parents=True)
        plan = {"install": [{"metadata": {"name": name}} for name in packages]}
        (self.bin / "plan.json").write_text(json.dumps(plan))
        (self.bin / "python").write_text(PIP)
        (self.bin / "python").chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("TESSERA_")}
        return subprocess.run(
            [sys.executable, str(self.folder / "scripts" / "torch_env.py"), *arguments],
            env=variables | environment,
            capture_output=True,
            text=True,
        )

    @property
    def asked(self) -> str:
        return (self.bin / "asked").read_text()


def test_a_build_for_cpus_is_installed_at_the_pinned_versions(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, ("torch", "numpy", "sympy"))
    done = checkout.run()
    assert (done.returncode, done.stderr) == (0, "")
    pins = f"--constraint {tmp_path / 'requirements' / 'torch.txt'}"
    assert f"{pins} torch numpy" in checkout.asked
    assert (checkout.bin / "installed").exists()
    before = checkout.asked.count("pip")
    assert checkout.run().returncode == 0
    assert checkout.asked.count("pip") == before  # what is there is not installed again


@pytest.mark.parametrize("extra", ["nvidia-cublas-cu12", "triton", "NVIDIA-cudnn"])
def test_a_build_for_cuda_is_not_installed_and_the_status_is_3(extra: str, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, ("torch", extra, "numpy"))
    done = checkout.run()
    assert done.returncode == 3
    assert "only PyTorch's build for CUDA can be had, with 1 more packages" in done.stdout
    assert not (checkout.bin / "installed").exists()


def test_the_interpreter_is_the_one_that_is_named_or_the_one_that_was_made(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, ("torch", "numpy"))
    named = checkout.run("--show", TESSERA_TORCH_PYTHON="/opt/python")
    assert named.stdout == "/opt/python\n"
    missing = checkout.run("--show")
    if missing.returncode:  # this interpreter has no PyTorch itself
        assert missing.stderr.startswith("error: there is no PyTorch; run")
        assert checkout.run().returncode == 0
        assert checkout.run("--show").stdout == f"{checkout.bin / 'python'}\n"


def test_the_pins_name_an_exact_version_of_each_package() -> None:
    lines = (ROOT / "requirements" / "torch.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {"torch", "numpy", "transformers", "accelerate"} <= set(pins)
    assert pins["torch"] == "2.13.0"  # later releases have no build for CPUs in every index
