"""The kind and the description of a program's failure, from its status and its output."""

from __future__ import annotations

import re
import signal

OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|OutOfMemoryError|HIP out of memory|RESOURCE_EXHAUSTED: Out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|^MemoryError|Cannot allocate memory"
    r"|DefaultCPUAllocator: can't allocate memory",
    re.MULTILINE,
)
GPU_FAILED = re.compile(
    r"uncorrectable (NVLink|ECC)|fallen off the bus|GPU is lost|CUDA error: device is lost"
    r"|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE",
    re.IGNORECASE,
)
NOT_STARTED = re.compile(
    r"Address already in use|EADDRINUSE|ModuleNotFoundError: |ImportError: |can't open file "
    r"|command not found|RendezvousConnectionError|DistNetworkError"
)
"""Outputs of a program that never began to train."""

ERROR_LINE = re.compile(
    r"^\s*(?:\[[^\]]*\]:?\s*)?(?P<text>[\w.]*(?:Error|Exception|Interrupt)\b.*)$"
)
"""The last line of a Python traceback, perhaps behind a launcher's prefix."""

RANK_EXIT = re.compile(r"^\s*rank\s*: (?P<rank>\d+)\b.*\n\s*exitcode\s*: (?P<status>-?\d+)", re.M)
"""A failed rank in the report of PyTorch's launcher. The last one in it is the first that failed."""

STATED_REASONS = frozenset(
    {"refused", "bad_checkpoint", "loss_not_finite", "out_of_memory", "error"}
)
"""The kinds of failure that a program may state itself (``tessera.progress.fail``)."""

SILENT = ", and wrote no message"
"""The end of a sentence on a program without output."""

MAX_TEXT = 300
"""Characters of an error that are shown."""

MAX_STATEMENT = 1000
"""Characters of an error that a program stated."""


def classify(status: int, text: str, *, began: bool, resumed: bool, killed_by_kernel: bool) -> str:
    """Return the kind of failure, a value of ``formulation.job.exit_reasons.ExitReason``.

    ``began`` says that the program made progress, ``resumed`` that it went on from a checkpoint, and
    ``killed_by_kernel`` that the kernel ended a process because host memory ran out.
    """
    if killed_by_kernel or OUT_OF_MEMORY.search(text):
        return "out_of_memory"
    if GPU_FAILED.search(text):
        return "gpu_failed"
    if not began and NOT_STARTED.search(text):
        return "not_started"
    if status == 0:
        return "ended_early"
    if status < 0 or ((found := _root_cause(text)) and int(found["status"]) < 0):
        return "killed"
    return "bad_checkpoint" if resumed and not began else "error"


def describe(status: int, outputs: dict[str, str]) -> str:
    """Return one sentence on the end: the last error in ``outputs``, by name, or the status.

    The outputs are in the order in which their ranks ended.
    """
    what, how = "the program", _how_it_ended(status)
    if found := _root_cause("\n".join(outputs.values())):
        what, how = f"rank {found['rank']}", _how_it_ended(int(found["status"]))
        outputs = {name: text for name, text in outputs.items() if not RANK_EXIT.search(text)}
    return f"{what} {how}{_quote_last(outputs) or SILENT}"


def describe_early_end(done: int, total: float, outputs: dict[str, str]) -> str:
    """Return a sentence on a program that exited with 0 after ``done`` of ``total`` iterations.

    The advice is before the output, because some views cut a long sentence.
    """
    if done:
        what = f"after {done:,} of {total:,.0f} iterations"
        advice = "if the program decides when it is done, submit the job with --until-exit"
    else:
        what = f"before it had reported any of its {total:,.0f} iterations"
        advice = (
            "let it report them (tessera.progress, or --progress-pattern), or submit the job with"
            " --until-exit"
        )
    quoted = _quote_last(outputs)
    return f"the program exited with status 0 {what}{'' if quoted else SILENT}; {advice}{quoted}"


def read_statement(stated: dict[str, object] | None) -> tuple[str, str] | None:
    """Return the kind of failure and the sentence that a program stated, or None without either."""
    if stated is None:
        return None
    reason, message = stated.get("reason"), stated.get("message")
    if not isinstance(message, str) or not message.strip():
        return None
    text = " ".join(message.split())[:MAX_STATEMENT]
    return (reason if isinstance(reason, str) and reason in STATED_REASONS else "error"), text


def _root_cause(text: str) -> re.Match[str] | None:
    """Return the rank that failed first, or None if no launcher reports any."""
    return max(RANK_EXIT.finditer(text), key=lambda found: found.start(), default=None)


def _quote_last(outputs: dict[str, str]) -> str:
    """Return the end of a sentence: the last error in ``outputs``, or the last line, by its name.

    It is "" if there is no output.
    """
    lines = [(name, line) for name, text in outputs.items() if (line := _last_error(text))]
    if not lines:
        lines = [(name, line) for name, text in outputs.items() if (line := _last_line(text))]
    if not lines:
        return ""
    name, line = lines[0]
    return f"; {name} says: {line[:MAX_TEXT]}"


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _last_error(text: str) -> str:
    for line in reversed(text.splitlines()):
        if match := ERROR_LINE.match(line):
            return match["text"].strip()
    return ""


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
