"""A program without any framework that trains under Tessera: it needs only Python.

Submit it with the runtime command and the progress pattern
``iteration (?P<iteration>[0-9]+) loss (?P<loss>[0-9.]+)``. It imports nothing of Tessera: it reads
the variables of its environment, and writes the file of TESSERA_PROGRESS_FILE after a checkpoint.

It fits a line by gradient descent, and computes the same numbers however often it is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

SLOPE, OFFSET = 3.0, -1.0


def sample(position: int) -> tuple[float, float]:
    """Return a point of the line. Its place follows from its position in the data alone."""
    x = (position * 2_654_435_761 % 1000) / 500 - 1
    return x, SLOPE * x + OFFSET


def run_iteration(weights: list[float], iteration: int, batch: int) -> float:
    """Train an iteration in place. Return the loss before it."""
    loss, gradients = 0.0, [0.0, 0.0]
    for position in range(iteration * batch, (iteration + 1) * batch):
        x, y = sample(position)
        error = weights[0] * x + weights[1] - y
        loss += error * error / batch
        gradients = [gradients[0] + error * x / batch, gradients[1] + error / batch]
    weights[:] = [w - 0.1 * gradient for w, gradient in zip(weights, gradients, strict=True)]
    return loss


def write_json(path: Path, value: object) -> None:
    """Replace a file in one step, so that nobody reads half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def save(folder: Path, iterations: int, weights: list[float], loss: float | None) -> None:
    """Write a checkpoint, and report it where Tessera reads it."""
    path = folder / f"iteration-{iterations}.json"
    write_json(path, {"iterations": iterations, "weights": weights})
    if "TESSERA_PROGRESS_FILE" in os.environ:
        checkpoint = {"iterations": iterations, "path": str(path)}
        report: dict[str, object] = {"iterations": iterations, "checkpoint": checkpoint}
        if loss is not None:
            report["loss"] = loss
        write_json(Path(os.environ["TESSERA_PROGRESS_FILE"]), report)


def main() -> None:
    """Train from the last checkpoint to the last iteration, or until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=100, help="iterations between checkpoints")
    parser.add_argument("--pause-s", type=float, default=0.0, help="waits, for demonstrations")
    parser.add_argument("--work-s", type=float, default=0.0, help="waits that the GPUs share")
    options = parser.parse_args()
    total = int(os.environ.get("TESSERA_ITERATIONS", "1000"))
    batch = int(os.environ.get("TESSERA_GLOBAL_BATCH", "16"))
    folder = Path(os.environ.get("TESSERA_CHECKPOINT_DIR", "."))
    gpus = int(os.environ.get("TESSERA_GPUS", "1"))
    is_first_node = os.environ.get("TESSERA_NODE_RANK", "0") == "0"
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))

    done, weights, loss = 0, [0.0, 0.0], None
    if resumed := os.environ.get("TESSERA_RESUME_FROM"):
        state = json.loads(Path(resumed).read_text(encoding="utf-8"))
        done, weights = state["iterations"], state["weights"]
    while done < total and not signals:
        loss = run_iteration(weights, done, batch)
        done += 1
        print(f"iteration {done} loss {loss:.12f}", flush=True)
        if is_first_node and done % options.every == 0:
            save(folder, done, weights, loss)
        time.sleep(options.pause_s + options.work_s / gpus)
    if is_first_node:
        save(folder, done, weights, loss)


if __name__ == "__main__":
    main()
