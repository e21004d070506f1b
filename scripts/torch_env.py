"""Make the virtual environment ``build/torch``, in which the example programs train on a CPU.

    python scripts/torch_env.py                       PyTorch and NumPy
    python scripts/torch_env.py --with-transformers   and what Hugging Face's Trainer needs
    python scripts/torch_env.py --show                print the interpreter that would be used

PyTorch's build for CUDA brings gigabytes of libraries along, so only a build for CPUs is installed.
If pip's indexes have none, the script says so and exits with status 3. Versions are those of
``requirements/torch.txt``. The environment is no part of ``make setup``: Tessera imports no PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "torch"
PYTHON = FOLDER / "bin" / "python"
PINS = ROOT / "requirements" / "torch.txt"
BASE = ("torch", "numpy")
TRANSFORMERS = ("transformers", "accelerate")
ONLY_CUDA = 3
"""The exit status if only PyTorch's build for CUDA can be had."""

CUDA_PACKAGES = ("nvidia-", "triton", "cuda-")
"""Beginnings of the names of packages that only the build for CUDA needs."""


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def find_interpreter() -> str | None:
    """Return the interpreter with PyTorch that tests and demonstrations use, or None.

    It is the one of TESSERA_TORCH_PYTHON, or this one, or the one of ``build/torch``.
    """
    if named := os.environ.get("TESSERA_TORCH_PYTHON"):
        return named
    if find_spec("torch") is not None:
        return sys.executable
    return str(PYTHON) if PYTHON.exists() and _has(("torch",)) else None


def planned_packages(report: str) -> list[str]:
    """Return the names of the packages that a report of ``pip install --report`` would install."""
    return [item["metadata"]["name"].lower() for item in json.loads(report)["install"]]


def cuda_packages(names: list[str]) -> list[str]:
    """Return the packages among ``names`` that only the build for CUDA needs."""
    return [name for name in names if name.startswith(CUDA_PACKAGES)]


def install(packages: tuple[str, ...]) -> None:
    """Install packages at the pinned versions, unless they are there. Exits if it cannot be done."""
    if _has(packages):
        return
    pip = (str(PYTHON), "-m", "pip", "--disable-pip-version-check")
    chosen = ("--only-binary", ":all:", "--constraint", str(PINS), *packages)
    say(f"asking pip what {' and '.join(packages)} would bring along")
    planned = subprocess.run(
        (*pip, "install", "-qq", "--dry-run", "--report", "-", *chosen),
        stdout=subprocess.PIPE,
        text=True,
    )
    if planned.returncode:
        sys.exit(
            f"error: pip's indexes do not have {' and '.join(packages)} at the versions of"
            f" {PINS.relative_to(ROOT)}"
        )
    if extra := cuda_packages(planned_packages(planned.stdout)):
        say(
            f"error: only PyTorch's build for CUDA can be had, with {len(extra)} more packages; give pip an"
            " index that has the build for CPUs, or name an interpreter in TESSERA_TORCH_PYTHON"
        )
        sys.exit(ONLY_CUDA)
    say(f"installing {' and '.join(packages)} in {FOLDER.relative_to(ROOT)}")
    done = subprocess.run((*pip, "install", "-qq", *chosen))
    if done.returncode:
        sys.exit(f"error: pip ended with status {done.returncode}")


def _has(modules: tuple[str, ...]) -> bool:
    code = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    return subprocess.run((PYTHON, "-c", code, *modules)).returncode == 0


def main() -> None:
    """Make the environment, or print its interpreter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--with-transformers", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the interpreter, and do nothing")
    options = parser.parse_args()
    if options.show:
        found = find_interpreter()
        if found is None:
            sys.exit("error: there is no PyTorch; run `python scripts/torch_env.py`")
        say(found)
        return
    if not PYTHON.exists():
        say(f"making {FOLDER.relative_to(ROOT)} with Python {sys.version.split()[0]}")
        subprocess.run((sys.executable, "-m", "venv", str(FOLDER)), check=True)
    install(BASE)
    if options.with_transformers:
        install(TRANSFORMERS)
    say(f"ready: {PYTHON}")


if __name__ == "__main__":
    main()
