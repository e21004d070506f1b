"""The Xids of NVIDIA's driver: which of them break a GPU, and which are a program's fault.

The source is the "Xid Catalog" of NVIDIA's "XID Errors" documentation, with its "Resolution Bucket
(Immediate Action)" for A100 to GB200. RESET_GPU, RESTART_BM and WORKFLOW_XID_48 are fatal here, and
RESTART_APP is the application's. Codes whose action depends on register values, which NVML does not
report, need attention: 74 and 144 to 150, for example. If they are grave, the driver asks for
a recovery action, which is a fault of its own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class XidClass(StrEnum):
    """The meaning of an Xid for its node."""

    FATAL = "fatal"  # the GPU must be reset, or its node rebooted, before the next program
    APPLICATION = "application"  # a program failed, and the GPU is well
    ATTENTION = "attention"  # something to look into; the GPU goes on


FATAL_XIDS: Final = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "the GPU's power management unit has halted",
    64: "a row of memory could not be remapped",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "an NVLink could not be trained",
    140: "unrecovered ECC error",
    143: "the GPU could not be initialised",
    155: "NVLink error reported by software",
    156: "memory was retired",
    158: "fatal timeout of the GPU",
}
"""The Xids that are faults of the GPU, with their meanings."""

APPLICATION_XIDS: Final = frozenset(
    {8, 11, 13, 25, 31, 32, 37, 43, 45, 60, 66, 68, 69, 80, 94, 139}
    | {39, 40, 41, 70, 71, 72, 75, 76, 77, 85}  # copy engines
    | {82, 83, 84, 86, 88, 89}  # video and JPEG engines
    | set(range(96, 106))
    | set(range(126, 136))  # further copy engines
)
"""The Xids of a program that failed. 94 is a memory error that hit no other program: if its row waits
to be remapped, the driver reports that as well.
"""


def classify_xid(xid: int) -> XidClass:
    """Return the meaning of an Xid. An unknown one needs attention, and drains no node."""
    if xid in FATAL_XIDS:
        return XidClass.FATAL
    return XidClass.APPLICATION if xid in APPLICATION_XIDS else XidClass.ATTENTION
