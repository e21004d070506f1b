"""Programs of the site that check a node. They run without a shell, and for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MAX_TAIL_BYTES: Final = 4096
"""Number of bytes at the end of a check's output in which its last line is looked for."""

MAX_DETAIL_CHARS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of a check. ``detail`` says why it failed, and is "" if it passed."""

    passed: bool
    detail: str = ""


async def run_check(
    argv: Sequence[str], timeout_s: float, environment: Mapping[str, str]
) -> CheckResult:
    """Run a check. It has passed if it ends with status 0 within ``timeout_s``.

    ``environment`` is added to the agent's own. A check that takes too long is killed with all
    processes that it has started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | environment,
        )
    except OSError as error:
        return CheckResult(passed=False, detail=f"cannot run {argv[0]}: {error.strerror}")
    tail = b""
    try:
        async with asyncio.timeout(timeout_s):
            while process.stdout is not None and (chunk := await process.stdout.read(65536)):
                tail = (tail + chunk)[-MAX_TAIL_BYTES:]
            await process.wait()
    except TimeoutError:
        return CheckResult(passed=False, detail=f"{argv[0]} did not end within {timeout_s:g} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode == 0:
        return CheckResult(passed=True)
    return CheckResult(
        passed=False, detail=_last_line(tail) or f"{argv[0]} ended with {process.returncode}"
    )


def _last_line(output: bytes) -> str:
    """Return the last line that is not empty, cut to size, or ""."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines()]
    text = next((line for line in reversed(lines) if line), "")
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_DETAIL_CHARS]
