"""A stand-in for torchrun. The nodes of a gang have equal numbers of GPUs."""

from __future__ import annotations

import argparse
import sys
from string import Template

from ranks import run_ranks  # type: ignore[import-not-found]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nnodes", "node-rank", "nproc-per-node", "master-port", "max-restarts"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--no-python", action="store_true", required=True)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    program, *arguments = options.words
    words = [program, *(Template(word).substitute() for word in arguments)]
    count = options.nproc_per_node
    sys.exit(run_ranks(words, options.node_rank * count, count, options.nnodes * count))
