"""The program of a keeper: it runs one member of a gang from its start to its end.

It is run by path as ``python -S -E -s main.py`` and reads its specification as JSON from standard
input. An empty specification means that the agent died before it had recorded this process's id.
Nothing has happened yet then, and the keeper does nothing.

It writes ``running`` to standard output once the program runs, ``progress.json`` as the program
advances, and ``exit.json`` at the end, in the member's directory. SIGTERM asks the program to write
a checkpoint and exit; SIGUSR1 asks it for a checkpoint. Both are blocked and read one by one.
"""

from __future__ import annotations

import json
import os
import signal
import sys

if __name__ == "__main__":  # without site, the checkout or site-packages must be named
    here = os.path.abspath(__file__)  # ROOT/tessera/service/agent/keeper
    sys.path[0] = here.rsplit(os.sep, 5)[0]

from tessera.service.agent.checkpoint import StaleGeneration
from tessera.service.agent.files import write_json
from tessera.service.agent.keeper import children
from tessera.service.agent.keeper.member import MemberRun
from tessera.service.agent.keeper.spec import KeeperSpec, spec_from_plain
from tessera.service.agent.keeper.store import NoIntactCheckpoint

STATUS = {"succeeded": 0, "stopped": 128 + signal.SIGTERM, "failed": 1}
"""The keeper's own exit status, by outcome."""


def keep_member(spec: KeeperSpec) -> dict[str, str]:
    """Run the member to its end; return its outcome, the kind of failure and its error."""
    children.become_subreaper()
    run = MemberRun(spec)
    try:
        return run.run()
    except StaleGeneration as error:
        return failure("error", str(error))
    except NoIntactCheckpoint as error:
        return failure("bad_checkpoint", str(error))
    except children.ProgramNotStarted as error:
        return failure("not_started", str(error))
    except (OSError, ValueError) as error:
        return failure("not_started", f"the keeper failed: {error}")
    finally:
        children.end_descendants()
        run.close()


def failure(reason: str, error: str) -> dict[str, str]:
    """Return the outcome of a failure."""
    return {"outcome": "failed", "reason": reason, "error": error}


def main() -> int:
    """Read the specification and run the member; return the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    text = sys.stdin.read()
    if not text:
        return 0
    spec = spec_from_plain(json.loads(text))
    outcome = keep_member(spec)
    write_json(os.path.join(spec.directory, "exit.json"), outcome)
    return STATUS[outcome["outcome"]]


if __name__ == "__main__":
    sys.exit(main())
