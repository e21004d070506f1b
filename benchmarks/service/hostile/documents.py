"""Documents that are much more expensive to read than to send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

MIB: Final = 2**20


def nest_aliases(levels: int, width: int) -> str:
    """Return a few hundred bytes of YAML whose aliases expand to width ** levels values."""
    lines = ["a0: &a0 [" + ", ".join(["x"] * width) + "]"]
    lines += [f"a{k}: &a{k} [" + ", ".join([f"*a{k - 1}"] * width) + "]" for k in range(1, levels)]
    return "\n".join(lines) + f"\nlayers: *a{levels - 1}\n"


def nest_merges(levels: int, width: int) -> str:
    """Return YAML whose merge keys copy the mapping of the previous level ``width`` times."""
    lines = ["m0: &m0 {x: 1}"]
    lines += [
        f"m{k}: &m{k} {{<<: [" + ", ".join([f"*m{k - 1}"] * width) + f"], k{k}: 1}}"
        for k in range(1, levels)
    ]
    return "\n".join(lines) + "\n"


def nest_brackets(depth: int) -> str:
    """Return sequences nested ``depth`` times, in JSON that is also YAML."""
    return "[" * depth + "]" * depth


def nest_braces(depth: int) -> str:
    """Return mappings nested ``depth`` times, in JSON that is also YAML."""
    return '{"a":' * depth + "1" + "}" * depth


def indent_blocks(depth: int) -> str:
    """Return YAML with block mappings of increasing indentation."""
    return "".join(" " * k + "a:\n" for k in range(depth))


def list_keys(size: int) -> str:
    """Return a JSON object of short keys, about ``size`` characters long."""
    count = max(1, size // 16)
    return "{" + ",".join(f'"k{i:08d}":{i % 10}' for i in range(count)) + "}"


def list_lines(size: int) -> str:
    """Return a YAML mapping of short lines, about ``size`` characters long."""
    return "".join(f"k{i:08d}: [1]\n" for i in range(max(1, size // 15)))


def hostile_texts(limit: int) -> Iterator[tuple[str, str]]:
    """Yield names and texts of at most ``limit`` characters, or slightly more to test the limit."""
    yield "nested aliases", nest_aliases(9, 9)
    yield "many aliases", nest_aliases(60, 2)
    yield "merged aliases", nest_merges(30, 9)
    yield "an alias of itself", "a: &a [*a, *a]\narchitecture: *a\nkind: *a\n"
    for name, nest in (("brackets", nest_brackets), ("braces", nest_braces)):
        for depth in (900, 20_000):
            yield f"{depth:,} {name}", nest(min(depth, limit // 8))
    yield "braces in YAML", "# YAML\n" + nest_braces(min(20_000, limit // 8))
    yield "deep blocks", indent_blocks(min(350, limit // 4))
    yield "many keys", list_keys(min(limit, 4 * MIB) - 100)
    yield "many lines", list_lines(min(limit, 2 * MIB) - 100)
    yield "a long text", "x" * (limit - 1)
    yield "a text that is too long", "x" * (limit + 1)
    yield "many quotes", '"' * (min(limit, MIB) - 1)
    yield "many questions", "? " * (min(limit, MIB // 4) // 2)
    yield "many tags", "!a " * (min(limit, MIB // 4) // 3)
    yield "a set as key", "? {a: 1}\n: 1\n"
    yield "no such date", "architecture: 2001-99-99\n"
    yield "binary", "architecture: !!binary " + "A" * 1000 + "\n"
    yield "a Python object", "architecture: !!python/object/apply:os.getcwd []\n"
    yield "controls", 'architecture: "\\u0000\\ud800"\n'
    for name, number in hostile_numbers(limit):
        yield f"{name} as layers", f"architecture: transformer\nlayers: {number}\n"


def hostile_numbers(limit: int) -> Iterator[tuple[str, str]]:
    """Yield names and numbers that are too large or expensive to read."""
    digits = min(50_000, limit // 2)
    yield "digits", "9" * digits
    yield "hexadecimal digits", "0x" + "f" * digits
    yield "base 60", ":".join(["59"] * min(10_000, limit // 6))
    yield "1e400", "1e400"
    yield "1.0e+308", "1.0e+308"
    yield "infinity", ".inf"
    yield "NaN", ".nan"
    yield "2**63", str(2**63)
    yield "-1", "-1"


_SIZES: Final = {"hidden": 1024, "heads": 16, "sequence": 1024, "vocabulary": 50_304}


def hostile_architectures() -> Iterator[tuple[str, str]]:
    """Yield names and architectures whose fields are well formed but far too large."""
    for layers in (10**4, 10**6, 10**9, 10**18):
        for kind in ("transformer", "moe"):
            experts = {"experts": 8} if kind == "moe" else {}
            text = {"architecture": kind, "layers": layers, **_SIZES, **experts}
            yield f"{kind} of {layers:,} layers", json.dumps(text)
    for name, value in (("hidden", 10**300), ("vocabulary", 10**18), ("heads", 10**9)):
        text = {"architecture": "transformer", "layers": 2, **_SIZES, name: value}
        yield f"{name} {value:.0e}", json.dumps(text)
    huge = {"architecture": "wide_resnet", "depth": 50, "width": 10**18, "classes": 10**18}
    yield "a very wide ResNet", json.dumps(huge)
    bert = {"model_type": "gpt2", "n_layer": 10**9, "n_head": 16, "n_embd": 1024, "n_ctx": 1024}
    yield "GPT-2 of 10**9 layers", json.dumps({**bert, "vocab_size": 50_257})


_HOST: Final = {
    "gpus": 64,
    "nics": 64,
    "pcie_switches": 64,
    "nic_bytes_per_s": "100Gb/s",
    "pcie_bytes_per_s": "32GB/s",
    "nvlink_bytes_per_s": "600GB/s",
}


def hostile_topologies(links: int) -> Iterator[tuple[str, str]]:
    """Yield names and topologies at and above the size limits.

    ``links`` is the number of links that are listed one by one.
    """
    clos = {"kind": "clos", "host": _HOST, "tor_bytes_per_s": "400Gb/s"}
    yield (
        "a Clos of 100,000 large hosts",
        json.dumps(
            {**clos, "hosts": 100_000, "tors": 100_000, "aggregations": 100_000, "cables": 1024}
        ),
    )
    yield (
        "a Clos of 2,000 large hosts",
        json.dumps({**clos, "hosts": 2_000, "tors": 500, "aggregations": 500}),
    )
    yield (
        "hosts of 100,000 each",
        json.dumps(
            {
                **clos,
                "hosts": [{"name": "h{}", "count": 100_000}] * 2_000,
                "tors": 1,
                "aggregations": 1,
            }
        ),
    )
    yield (
        "a torus of many sizes",
        json.dumps(
            {
                "kind": "torus",
                "hosts": 100_000,
                "host": _HOST,
                "sizes": [2] * 1_000,
                "link_bytes_per_s": "400Gb/s",
            }
        ),
    )
    small = {**_HOST, "gpus": 1, "nics": 1, "pcie_switches": 1}
    one = {"from": "host-0", "to": "s", "bytes_per_s": "100Gb/s", "cables": 1024}
    yield (
        f"{links:,} links",
        json.dumps(
            {
                "kind": "explicit",
                "hosts": 2,
                "host": small,
                "links": [one] * links,
                "switches": [{"name": "s", "tier": "tor"}],
            }
        ),
    )
    columns = {"source": [0] * links, "target": [1] * links, "bytes_per_s": [1e9] * links}
    yield (
        f"{links:,} links in columns",
        json.dumps(
            {
                "kind": "columns",
                "hosts": ["h"],
                "links": {**columns, "delay_s": [0] * links},
                "vertices": {"name": ["a", "b"], "tier": [0, 1], "host": [0, -1]},
            }
        ),
    )
