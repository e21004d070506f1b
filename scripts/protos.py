"""Generate ``proto/gen`` from ``proto/tessera``, and the client of programs without asyncio.

With ``--check``, it is checked that both are up to date.
"""

from __future__ import annotations

import filecmp
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import google.protobuf
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "proto" / "gen"
CLIENT: Final = ROOT / "proto" / "client" / "tessera" / "client"

WITHOUT_ASYNCIO: Final = {
    r"grpc\.aio\b": "grpc",
    r"with asyncio\. .*": 'without asyncio. ``scripts/protos.py`` generates it from ``aio``."""',
    r"(?<=import )asyncio|asyncio(?=\.sleep)": "time",
    r"\b(async|await) ": "",
    r"open_async_channel": "open_channel",
    r"__a(enter|exit)__": r"__\1__",
    r"\bAsync": "",
    r"It belongs to one event loop\.": "It can be shared by threads.",
}
"""Patterns in the client for asyncio, and what the client without asyncio has in their place."""


def generate(out: Path) -> None:
    """Write the messages, the services and their types below ``out``."""
    bin_dir = Path(sys.executable).parent
    sources = sorted(
        str(p.relative_to(ROOT / "proto")) for p in ROOT.glob("proto/tessera/**/*.proto")
    )
    well_known = Path(google.protobuf.__file__).parent.parent.parent
    arguments = [
        "protoc",
        f"-I{ROOT / 'proto'}",
        f"-I{Path(protoc.__file__).parent / '_proto'}",
        f"-I{well_known}",
        f"--plugin=protoc-gen-mypy={bin_dir / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={bin_dir / 'protoc-gen-mypy_grpc'}",
        *(f"--{kind}_out={out}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")),
        *sources,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")
    # `tessera` itself has no __init__.py, because the scheduler's rooms share the name.
    (out / "tessera" / "v1" / "__init__.py").touch()


def generate_client() -> str:
    """Return the module ``sync`` of the client, from its module ``aio``."""
    text = (CLIENT / "aio.py").read_text(encoding="utf-8")
    for pattern, replacement in WITHOUT_ASYNCIO.items():
        text = re.sub(pattern, replacement, text)
    ruff = [str(Path(sys.executable).parent / "ruff"), "format", "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Generate the stubs and the client, or check them."""
    client, module = generate_client(), CLIENT / "sync.py"
    if "--check" not in sys.argv:
        generate(OUT)
        module.write_text(client, encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {p.relative_to(folder) for p in Path(folder).rglob("*") if p.is_file()}
        kept = {p.relative_to(OUT) for p in OUT.rglob("*") if p.suffix in (".py", ".pyi")}
        stale = sorted(
            str(p)
            for p in fresh | kept
            if p not in fresh or p not in kept or not filecmp.cmp(Path(folder) / p, OUT / p, False)
        )
    if module.read_text(encoding="utf-8") != client:
        stale.append(str(module.relative_to(ROOT)))
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run `make proto`")


if __name__ == "__main__":
    main()
