"""A stand-in for Ray's command, with those options of Ray 2.1.0 that the runner uses."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """List the start of a node in ``ray-starts.jsonl`` of the job's directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["start"])
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--address")
    parser.add_argument("--port")
    parser.add_argument("--node-ip-address")
    parser.add_argument("--num-gpus")
    parser.add_argument("--include-dashboard", choices=["true", "false"])
    options = parser.parse_args()
    if os.environ.get("FAKE_RAY") == "fails":
        sys.exit("ray: no free port")
    starts = Path(os.environ["TESSERA_JOB_DIR"], "ray-starts.jsonl")
    with starts.open("a", encoding="utf-8") as file:
        file.write(json.dumps([options.head, options.address, options.num_gpus]) + "\n")


if __name__ == "__main__":
    main()
