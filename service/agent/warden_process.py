"""The process of the agent's warden, which the agent starts again if it ends."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Final

from tessera.service.agent import warden
from tessera.service.agent.process import Process, python_argv

log = logging.getLogger(__name__)

RESTART_S: Final = 5.0
"""Seconds until a warden that has ended, or could not start, is started again."""


async def keep_warden(root: Path) -> None:
    """Have a warden for the agent's data directory; never return.

    When this is cancelled, the warden goes on until nothing runs here any more.
    """
    while True:
        try:
            process = Process.spawn(
                python_argv(Path(warden.__file__)),
                json.dumps({"root": str(root)}),
                identity=root / warden.WARDEN_FILE,
                errors=root / "warden.log",
            )
        except OSError as error:
            log.warning(
                "cannot start the warden", extra={"event": "warden_not_started", "error": error}
            )
        else:
            try:
                status = await process.ended()
            finally:
                process.leave()
            log.warning("the warden has ended", extra={"event": "warden_ended", "status": status})
        await asyncio.sleep(RESTART_S)
