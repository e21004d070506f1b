"""The agent's memory of its GPUs on disk: which there were, and which are not settled after a fault."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tessera.service.agent.files import read_json, remove_file, write_json
from tessera.service.agent.hardware.faults import WHOLE_NODE, RememberedXid
from tessera.service.agent.lease import boot_id

log = logging.getLogger(__name__)

FILE_NAME = "hardware.json"
CLEAR_NAME = "hardware.clear"
"""The name of the file with which ``tessera-agent health clear`` asks the agent to forget faults."""


@dataclass(slots=True)
class HardwareMemory:
    """The contents of ``hardware.json`` in the data directory.

    ``uuids`` and ``product`` are the GPUs that were found when the agent started. ``xids`` are those
    of this boot, by index. ``unvalidated`` is whether the node has had a fault and was not tested
    since.
    """

    path: Path
    uuids: tuple[str, ...] = ()
    product: str = ""
    xids: dict[int, list[RememberedXid]] = field(default_factory=dict)
    unvalidated: bool = False
    _saved: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, data_dir: Path) -> Self:
        """Read the memory. A file that is missing or damaged holds nothing.

        Xids of an earlier boot are left out, because the reboot has reset the GPUs.
        """
        memory = cls(data_dir.resolve() / FILE_NAME)
        try:
            stored = read_json(str(memory.path))
            if stored is None:
                return memory
            memory.uuids = tuple(str(uuid) for uuid in stored["uuids"])
            memory.product = str(stored["product"])
            memory.unvalidated = bool(stored["unvalidated"])
            if stored["boot"] == boot_id():
                memory.xids = {
                    int(gpu): [
                        RememberedXid(xid=int(xid), asked=bool(asked)) for xid, asked in known
                    ]
                    for gpu, known in stored["xids"].items()
                    if int(gpu) >= WHOLE_NODE
                }
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            log.warning(
                "cannot read what is remembered of the GPUs, so that is nothing",
                extra={"event": "fault_memory_unread", "error": error},
            )
            return cls(memory.path)
        return memory

    def save(self) -> None:
        """Write the memory to disk if it has changed. A failure is logged."""
        value = {
            "boot": boot_id(),
            "uuids": list(self.uuids),
            "product": self.product,
            "unvalidated": self.unvalidated,
            "xids": {
                str(gpu): [[x.xid, x.asked] for x in known] for gpu, known in self.xids.items()
            },
        }
        if value == self._saved:
            return
        try:
            write_json(str(self.path), value)
        except OSError as error:
            log.warning(
                "cannot write down the faults, so a restart would forget them",
                extra={"event": "fault_memory_unwritten", "error": error},
            )
            return
        self._saved = value

    def take_clear_request(self) -> bool:
        """Return whether somebody has asked to forget the faults since the last call."""
        try:
            return remove_file(str(self.path.parent / CLEAR_NAME))
        except OSError as error:
            log.warning(
                "cannot remove the request to forget faults",
                extra={"event": "clear_request_left", "file": CLEAR_NAME, "error": error},
            )
            return False

    def forget(self) -> None:
        """Forget the Xids, and the GPUs that were there, so that the next start counts them again."""
        self.xids, self.uuids, self.product = {}, (), ""
