"""A program of two ranks that keep in step, for tests in which processes are killed.

It is run by path, once on each node, or as ``program.py stage`` before that. Each iteration continues
a chain of digests, so a lost, repeated or exchanged iteration shows in the last digest. All that a
rank does is in its ledger. At gates it leaves its process id, and waits if the test says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from tessera import progress

PAUSED_AT, SAVED_EVERY = 6, 4
"""Iterations after which the first generation waits for a stop, and between two checkpoints."""

LOOK_S = 0.01
"""Seconds between two looks at what this process waits for."""

FOLDER = Path(os.environ.get("TEST_FOLDER", ""))
GATE = os.environ.get("TEST_GATE", "")
GENERATION = os.environ.get("TESSERA_GENERATION", "")
RANK = os.environ.get("TESSERA_NODE_RANK", "")


def wait_while(condition: Callable[[], bool]) -> None:
    while condition():
        time.sleep(LOOK_S)


def pass_gate(point: str, *, until_stop: bool = False) -> None:
    """Note that this rank is at ``point``; wait there if it is the test's gate, or for a stop."""
    note = FOLDER / f"{GENERATION}-{RANK}-{point}"
    partial = note.with_suffix(".partial")
    partial.write_text(str(os.getpid()))
    partial.replace(note)
    if until_stop:
        wait_while(lambda: not progress.stop_requested())
    if f"{GENERATION}-{point}" == GATE:
        wait_while(lambda: not (FOLDER / "go").exists())


def claim_gpu() -> TextIO:
    """Claim this rank's GPU until the process ends. It must not be claimed yet."""
    device = f"{os.environ['TEST_NODE']}-{os.environ['CUDA_VISIBLE_DEVICES']}"
    claim = (Path(os.environ["TEST_GPUS"]) / device).open("w")
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (FOLDER / f"twice-{device}").touch()
        sys.exit(f"two programs use {device}")
    return claim


def meet() -> socket.socket:
    """Return a connection to the other rank. Exit if a stop is requested before it comes."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = socket.create_server(place) if RANK == "0" else None
    while not progress.stop_requested():
        try:
            if listener is None:
                return socket.create_connection(place)
            listener.settimeout(LOOK_S)
            connection, _ = listener.accept()
        except (TimeoutError, ConnectionRefusedError):
            time.sleep(LOOK_S)
            continue
        connection.settimeout(None)
        return connection
    sys.exit(0)


class Peer:
    """The connection to the other rank."""

    def __init__(self) -> None:
        """Meet the other rank."""
        self._connection = meet()
        self._lines = self._connection.makefile("r", encoding="utf-8")

    def agree(self, *wishes: bool) -> list[bool]:
        """Return for each wish whether one of the ranks has it."""
        try:
            self._connection.sendall(json.dumps(wishes).encode() + b"\n")
            line = self._lines.readline()
        except OSError:
            line = ""
        if not line:
            sys.exit("the other rank is gone")
        return [mine or theirs for mine, theirs in zip(wishes, json.loads(line), strict=True)]


def main() -> None:
    """Train from the last checkpoint on."""
    progress.catch_stop()
    claim = claim_gpu()
    with (progress.job_dir() / f"ledger-{GENERATION}-{RANK}").open("a") as ledger:

        def note(**entry: object) -> None:
            ledger.write(json.dumps(entry) + "\n")
            ledger.flush()

        train(note)
    claim.close()


def train(note: Callable[..., None]) -> None:
    """Do the iterations that are left, and note all of it."""
    begin = done = progress.resume_iterations()
    path, digest = progress.resume_path(), ""
    if path is not None:
        saved = json.loads((path / RANK).read_text())
        assert saved["done"] == done
        digest = saved["digest"]
    note(begin=begin)
    pass_gate("launched")
    peer, total = Peer(), progress.iterations_total(0)
    while done < total:
        if done == PAUSED_AT and GENERATION == "1":
            pass_gate("train", until_stop=True)
        if done == total - 1:
            pass_gate("last")
        is_due = done > begin and done % SAVED_EVERY == 0
        stop, save = peer.agree(progress.stop_requested(), is_due)
        if stop:
            pass_gate("stop")
        if save or stop:
            path = progress.checkpoint_path(done)
            path.mkdir(exist_ok=True)
            (path / RANK).write_text(json.dumps({"done": done, "digest": digest}))
            peer.agree()
            progress.report_checkpoint(done, path)
            note(checkpoint=done)
        if stop:
            pass_gate("saved")
            return
        digest = hashlib.sha256(f"{digest} {done}".encode()).hexdigest()
        done += 1
        note(done=done, digest=digest)
        progress.report(done, loss=1 / done)


if __name__ == "__main__":
    if sys.argv[1:] == ["stage"]:
        pass_gate("staging")
    else:
        main()
