"""Every command that reads a file of its user, on files that are not what they should be."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from tessera.estimator.files import userfiles
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.main import app

KNOWN: Final = "estimate --model bert/1.3B --batch 8 --gpu a100 --count 1"
JOB: Final = "submit a --model bert --params 1.3B --batch 8 --iterations 9 --gpus 1"
TRACE: Final = """\
job_id,submit_time_s,model,params,global_batch,num_iterations,num_gpus
a,0,bert,1.3B,8,9,1
"""

COMMANDS: Final = {
    "jobs": "submit -f FILE",
    "a stated plan": f"{JOB} --plan FILE",
    "a submitted plan": f"{JOB} --submitted-plan FILE",
    "variables": f"{JOB} --command x --env-from-file FILE",
    "jobs of a question": "whatif --job-file FILE",
    "a cluster": "cluster apply -f FILE",
    "tenants": "tenants apply -f FILE",
    "an architecture to add": "models add m/1B --architecture FILE",
    "a topology": "topology set FILE",
    "profiles": "import profiles FILE",
    "a trace": "import trace FILE",
    "a trace's profiles": "import trace TRACE --profiles FILE --to OUT",
    "a simulated trace": "simulate FILE --profiles FILE --nodes a100=1x1",
    "a snapshot": "solve FILE",
    "GPU types": f"{KNOWN} --hardware FILE",
    "collectives": f"{KNOWN} --collectives FILE",
    "layers": f"{KNOWN} --profile FILE",
    "an architecture": "estimate --architecture FILE --batch 8 --gpu a100 --count 1",
    "a Hugging Face model": "estimate --hf FILE --batch 8 --gpu a100 -n 1",
    "an estimated plan": f"{KNOWN} --plan FILE",
    "settings": "config print --config FILE",
    "settings of a server": "serve --config FILE",
    "a cluster to start": "up --file FILE",
}

KINDS: Final[dict[str, Callable[[Path], object]]] = {
    "not text": lambda path: path.write_bytes(b"a: 1\nb: \xff\xfe\n"),
    "with a NUL": lambda path: path.write_bytes(b"a: 1\nb: x\0y\n"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "truncated": lambda path: path.write_bytes("a: ü".encode()[:-1]),
    "a directory": lambda path: path.mkdir(),
    "a pipe that nobody writes to": os.mkfifo,
    "nothing": lambda _path: None,
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", COMMANDS)
def test_a_file_that_cannot_be_read_is_one_sentence_with_its_path(
    what: str, kind: str, tmp_path: Path
) -> None:
    bad, trace, out = (tmp_path / name for name in ("bad.file", "trace.csv", "out.csv"))
    KINDS[kind](bad)
    trace.write_text(TRACE)
    place = {"FILE": str(bad), "TRACE": str(trace), "OUT": str(out)}
    arguments = [place.get(word, word) for word in COMMANDS[what].split()]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, (arguments, result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert "bad.file" in result.stderr, result.stderr
    assert "Traceback" not in result.output


def test_a_pipe_with_a_slow_writer_is_read_to_its_end(tmp_path: Path) -> None:
    """As the shell gives it for `<(command)`."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    is_open = threading.Event()

    def write() -> None:
        with path.open("wb") as file:
            is_open.wait()
            file.write(200_000 * b"x")
            file.write(b"y")

    writer = threading.Thread(target=write)
    writer.start()
    for start in waiting_writers(path):
        is_open.set()
        assert start + userfiles.read_bytes(path) == 200_000 * b"x" + b"y"
    writer.join()


def waiting_writers(path: Path) -> Iterator[bytes]:
    """Yield once a writer has opened the pipe."""
    descriptor = os.open(path, os.O_RDONLY)
    yield b""
    os.close(descriptor)


def test_a_file_is_read_to_its_limit_and_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1234")
    assert userfiles.read_bytes(path, 4) == b"1234"
    with pytest.raises(InvalidInput, match=r"f: must have at most 3 bytes"):
        userfiles.read_bytes(path, 3)
    with pytest.raises(InvalidInput, match=r"/dev/zero: must have at most 100,000 bytes"):
        userfiles.read_bytes("/dev/zero", 100_000)
    with pytest.raises(InvalidInput, match="is not the path of a file"):
        userfiles.read_bytes("a\0b")
    path.write_bytes(b"\xef\xbb\xbfa")
    assert userfiles.read_text(path) == "a"
