"""The runner of the system's network tools. All back ends use it, so tests can replace it."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence

from tessera.formulation.base.errors import Unavailable

RunCommand = Callable[[Sequence[str]], str]
"""A function that runs a command and returns its output. Raises Unavailable."""

PATIENCE_S = 20.0

SYSTEM_PATH = "/usr/sbin:/sbin"
"""The directories that hold these tools, which are often missing from a user's PATH."""

_ADVICE = (
    ("not permitted", "run the agent as root, or give it CAP_NET_ADMIN"),
    ("qdisc kind is unknown", "load the kernel's module for it, or choose the other discipline"),
    ("Cannot find device", "check the interface's name with `ip link`"),
    ("No such device", "check the interface's name with `ip link`"),
    ("not supported", "this driver has no such table; use another back end, or `none`"),
)


def run_command(argv: Sequence[str]) -> str:
    """Run ``argv`` and return its standard output.

    Raises:
        Unavailable: it is not installed, failed or did not end; the message says which, and what to
            do.
    """
    command = shlex.join(argv)
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PATH": search_path()},
        )
    except FileNotFoundError as error:
        raise Unavailable(
            f"`{command}`: {argv[0]} is not installed; it is part of iproute2"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"`{command}` did not end within {PATIENCE_S:g} s") from error
    if done.returncode != 0:
        output = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise Unavailable(f"`{command}` ended with {done.returncode}: {output}{_advice(output)}")
    return done.stdout


def search_path() -> str:
    """Return PATH with the system's own directories at its end."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), SYSTEM_PATH])


def runner_inside(netns: str) -> RunCommand:
    """Return ``run_command`` for the network namespace ``netns``; "" is the agent's own."""
    if not netns:
        return run_command
    return lambda argv: run_command(["ip", "netns", "exec", netns, *argv])


def _advice(said: str) -> str:
    return next((f"; {advice}" for words, advice in _ADVICE if words in said), "")
