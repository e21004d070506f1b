"""Certificates on the command line of a round whose counts do not fit on nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tessera.benchmarks.service.fleet import Fleet
from tests.support.command_line import Tessera, read

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "verify_certificate.py"
PROFILES = """\
model,params,global_batch,gpu_type,num_nodes,gpus_per_node,iter_time_s,status,pipeline_degree
bert,1.3B,240,a100,1,3,1.0,ok,1
gpt,1.3B,240,a100,1,2,1.0,ok,1
"""


def submit_gang(tessera: Tessera, name: str, model: str, gpus: int) -> None:
    command = f"submit {name} --model {model} --params 1.3B --batch 240 --iterations 1000"
    tessera(*command.split(), "--gpus", str(gpus))


def test_anyone_can_check_a_round_with_packing_rows(
    tessera: Tessera, fleet: Fleet, tmp_path: Path
) -> None:
    """Two gangs of 3 and one of 2 fill 8 GPUs by counts, but not two nodes of 4."""
    profiles = tmp_path / "gangs.csv"
    profiles.write_text(PROFILES)
    tessera("import", "profiles", str(profiles))
    for name, model, gpus in (("one", "bert", 3), ("two", "bert", 3), ("pair", "gpt", 2)):
        submit_gang(tessera, name, model, gpus)
    tessera("round", "--objective", "throughput")
    checked = tessera("certificate", "verify", "1").stdout
    assert "throughput: no answer is worth more than" in checked
    (goal,) = read(tessera, "certificate", "verify", "1")["goals"]
    assert goal["goal"]["certified"]
    assert goal["goal"]["proved_by"] in ("prices", "branching")
    document = tessera("certificate", "export", "1").stdout
    rows = [row["name"] for row in json.loads(document)["goals"][0]["rows"]]
    assert any(name.startswith("packing/a100: shares of ") for name in rows)
    command = [sys.executable, "-I", "-S", str(SCRIPT)]
    run = subprocess.run(command, input=document, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("throughput: worth ")
    tessera("replay", "1")
