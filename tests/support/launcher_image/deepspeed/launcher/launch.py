"""A stand-in for the launcher of DeepSpeed on a node."""

from __future__ import annotations

import argparse
import base64
import json
import sys

from ranks import run_ranks  # type: ignore[import-not-found]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--node_rank", type=int, required=True)
    for name in ("world_info", "master_addr", "master_port"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("no_python", "no_local_rank"):
        parser.add_argument(f"--{name}", action="store_true", required=True)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    nodes = list(json.loads(base64.urlsafe_b64decode(options.world_info)).values())
    lower_nodes, node_gpus = nodes[: options.node_rank], nodes[options.node_rank]
    first_rank, world = sum(map(len, lower_nodes)), sum(map(len, nodes))
    sys.exit(run_ranks(options.words, first_rank, len(node_gpus), world))
