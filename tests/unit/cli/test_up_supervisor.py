"""Parts of ``tessera up`` that end are started again, until they have ended too often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.formulation.base.errors import Unavailable
from tessera.service.cli.servers.up.supervisor import MAX_RESTARTS, WINDOW_S, Supervisor


class FragilePart:
    """A part that has ended whenever a test says so."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log, self.ending, self.starts = name, log, "", 0

    def find_ending(self) -> str:
        return self.ending

    def start(self) -> None:
        self.ending, self.starts = "", self.starts + 1


def test_a_part_is_started_again_at_once_and_after_longer_pauses_if_it_ends_again(
    tmp_path: Path,
) -> None:
    told = list[str]()
    (tmp_path / "log").write_text("the reason\n")
    server, agent = (FragilePart(name, tmp_path / "log") for name in ("server", "agent-0"))
    supervisor = Supervisor([server, agent], told.append, "correct the cause")
    now_s = 100.0
    for pause_s in (0, 1, 2, 4, 8):
        server.ending = "was killed by SIGKILL"
        starts = server.starts
        supervisor.check(now_s)
        if pause_s:
            supervisor.check(now_s + pause_s - 0.1)
            assert server.starts == starts
            supervisor.check(now_s + pause_s)
        assert server.starts == starts + 1
        now_s += pause_s + 1
    assert agent.starts == 0
    assert told[0] == "server was killed by SIGKILL; it is started again now"
    assert told[-1] == "server was killed by SIGKILL; it is started again in 8 s"
    assert len(told) == MAX_RESTARTS
    server.ending = "ended with status 1"
    with pytest.raises(Unavailable) as caught:
        supervisor.check(now_s)
    error = str(caught.value)
    assert "server was started again 5 times within 10 minutes, but ended with status 1" in error
    assert "correct the cause" in error
    assert error.endswith("log ends with:\nthe reason")
    supervisor.check(now_s + WINDOW_S + 1)  # restarts long ago do not count
    assert server.starts == MAX_RESTARTS + 1
