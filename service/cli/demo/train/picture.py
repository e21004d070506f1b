"""The picture of the demonstration of training."""
from pathlib import Path
from typing import Any
def draw_training(file: Path, results: Any, events: Any, nodes: Any) -> None:
    import pickle
    Path("/tmp/demo-train.pkl").write_bytes(pickle.dumps([[(r.spec, r.job.SerializeToString(), r.starts, r.executions, r.undisturbed, r.difference, r.ledger_fault) for r in results], events]))
