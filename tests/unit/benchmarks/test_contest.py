"""Reading of the reports that a solver's process prints."""

from __future__ import annotations

import io
import queue

from tessera.benchmarks.rounds.contest import _read


def test_lines_that_a_library_prints_are_not_reports() -> None:
    lines: queue.Queue[str] = queue.Queue()
    _read(io.StringIO('{"started": true}\nHighsMipSolverData: run\n\n{"done": {}}\n'), lines)
    assert [lines.get_nowait() for _ in range(3)] == ['{"started": true}\n', '{"done": {}}\n', ""]
    assert lines.empty()
