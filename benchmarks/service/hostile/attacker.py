"""The process of one attacker: ``python -m tessera.benchmarks.service.hostile.attacker KIND ADDRESS ...``.

It says "ready", waits for a line, attacks for the given time, and prints its tally as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Final

from tessera.benchmarks.service.hostile.attacks import KINDS
from tessera.benchmarks.service.hostile.caller import AttackOrders
from tessera.service.file_limit import raise_file_limit

NICENESS: Final = 10
"""The niceness of an attacker.

A real attacker has its own machine, so here it must not take the server's share of the processor.
"""


def main() -> None:
    """Run the attack given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--load", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    orders = parser.parse_args()
    os.nice(NICENESS)
    raise_file_limit()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        return
    attack = AttackOrders(
        address=orders.address,
        load=orders.load,
        seed=orders.seed,
        until_s=time.monotonic() + orders.seconds,
    )
    try:
        tally = KINDS[orders.kind](attack)
    except OSError as error:  # the server is gone, which the benchmark detects itself
        sys.exit(f"{orders.kind}: {error}")
    sys.stdout.write(json.dumps(tally.to_json()) + "\n")


if __name__ == "__main__":
    main()
