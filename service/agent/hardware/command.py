"""``tessera-agent health``, which shows what an agent remembers of faults, or clears that."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tessera.service.agent.files import open_private
from tessera.service.agent.hardware.memory import CLEAR_NAME, HardwareMemory

EXIT_INVALID = 2


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status, which is 2 if something is wrong."""
    options = _parser().parse_args(arguments)
    try:
        if options.action == "show":
            sys.stdout.write(json.dumps(_describe(options.data_dir), indent=2) + "\n")
            return 0
        os.close(open_private(str(options.data_dir.resolve() / CLEAR_NAME)))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_INVALID
    sys.stdout.write("requested: the agent forgets its faults within seconds, or when it starts\n")
    return 0


def _describe(data_dir: Path) -> dict[str, object]:
    memory = HardwareMemory.load(data_dir)
    return {
        "gpus": list(memory.uuids),
        "product": memory.product,
        "xids": {gpu: [one.xid for one in known] for gpu, known in memory.xids.items()},
        "unvalidated": memory.unvalidated,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-agent health",
        description="Show the faults that the agent of this node remembers, or clear them after a repair.",
    )
    parser.add_argument(
        "action",
        choices=("show", "clear"),
        help="show: print them as JSON. clear: forget Xids and missing GPUs, and validate again.",
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="The agent's data directory.")
    return parser
