"""An interpreter of programs that finds JAX, and stand-ins of the frameworks that are not installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

from tests.support.alpa_jobs import IMAGE

LAUNCHERS: Final = Path(__file__).parent / "launcher_image"


def make_framework_python(folder: Path) -> Path:
    """Make an environment in ``folder``, and return its folder of programs.

    It finds the packages of this one, then the stand-ins. No variable is needed for that, since an
    agent asks the interpreter without its own.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    places = [sysconfig.get_path("purelib"), str(IMAGE), str(LAUNCHERS)]
    (packages / "stand_ins.pth").write_text("\n".join([*places, ""]))
    return folder / "bin"
