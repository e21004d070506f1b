"""Generate ``proto/gen`` from ``proto/tessera``, or check with ``--check`` that it is up to date."""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

import google.protobuf
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "proto" / "gen"


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


def main() -> None:
    """Generate the stubs, or check them."""
    if "--check" not in sys.argv:
        generate(OUT)
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
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run `make proto`")


if __name__ == "__main__":
    main()
