"""A shell in a separate terminal, with typed commands, their outputs and their exit codes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

COLUMNS = 120
ROWS = 50
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")


class Terminal:
    """Bash on a pseudo terminal, used as a context manager."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._number, self._text = 0, ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._shell = subprocess.Popen(
            # setsid makes the terminal bash's own; `preexec_fn` would fork a process with threads
            ["setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"],
            cwd=folder,
            env={
                **environment,
                "TERM": "xterm",
                "PS1": "",
                "PS2": "",
                "VIRTUAL_ENV_DISABLE_PROMPT": "1",
            },
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self.run("stty -echo noflsh; PS1= PS2=; bind 'set enable-bracketed-paste off'", 60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.send_signal(signal.SIGHUP)
        self._shell.kill()
        self._shell.wait()
        os.close(self._master)

    def run(self, command: str, within_s: float) -> tuple[int, str]:
        """Type a command, and return its exit code and output."""
        self.type(command)
        return self.end(within_s)

    def type(self, command: str) -> None:
        """Type a command followed by a marker for its end, without waiting for it."""
        self._number += 1
        self._text = ""
        self._send(f"{command}\nprintf '\\nended-%d-%d\\n' {self._number} $?\n")

    def wait_for_match(self, wanted: re.Pattern[str], within_s: float) -> str:
        """Return the output as soon as it matches. Fail if the command ends before that."""
        return self._read(wanted, within_s)

    def end(self, within_s: float) -> tuple[int, str]:
        """Wait until the typed command has ended, and return its exit code and output."""
        ended = re.compile(rf"\nended-{self._number}-(\d+)\n")
        text = self._read(ended, within_s)
        match = ended.search(text)
        assert match is not None
        return int(match[1]), text[: match.start()].strip("\n")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._send("\x03")

    def _send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def _read(self, wanted: re.Pattern[str], within_s: float) -> str:
        until_s = time.monotonic() + within_s
        ended = re.compile(rf"\nended-{self._number}-\d+\n")
        while not wanted.search(self._text):
            assert not ended.search(self._text), f"it ended without {wanted.pattern}:\n{self._text}"
            left_s = until_s - time.monotonic()
            assert left_s > 0, f"no {wanted.pattern} within {within_s:g} s:\n{self._text[-4000:]}"
            if select.select([self._master], [], [], min(left_s, 1.0))[0]:
                raw = os.read(self._master, 65536).decode(errors="replace")
                self._text += ESCAPES.sub("", raw)
        return self._text
