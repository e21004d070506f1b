"""The program of jobs that train by Alpa 0.2.3, in the interpreter of an image that has Alpa.

It is started as ``alpa_runner.py [-m] PROGRAM ARGUMENT...`` on each node, by Python 3.8 or later.
Standard input has the plan as one JSON document, in Alpa's own words
(``service/agent/runtimes/arguments/alpa.py``). Reports go to standard output, one line each:
``REPORT`` and a JSON object. Lines of any other form are the program's own.

PROGRAM is a script or a module that defines ``build(plan)``. It returns three values:

* ``train_step(state, batch)``, which returns the next state and the loss;
* the first state, a pytree that Flax can write;
* ``make_batch(iteration)``, which returns the samples of an iteration, the first of which is 0.

``plan`` is the execution plan as JSON's plain values, or None. ``train_step`` differentiates by
``alpa.value_and_grad``. A plan with stages needs ``alpa.mark_pipeline_boundary()`` between any two
layers of the plan. A program may set ``STOP_IF_NOT_FINITE = False``.

The first node starts Ray's head, and the others join it. They meet through files in the directory
of checkpoints, which all nodes share. Alpa restores checkpoints only within a Ray cluster, so one
node starts one, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

import alpa

REPORT = "@tessera-report "
"""The beginning of a line that is a report."""

MAX_MESSAGE = 1000
"""Characters of a message that are reported, so that the line is read whole."""

PAUSE_S = 0.2
"""Seconds between two looks for a file of another node."""

ENDED = "ended"
HEAD = "head"
"""Names of files by which the first node says that Ray's head is up, and that the job has ended."""


class StopFlag:
    """Whether SIGTERM has come."""

    is_set = False

    @classmethod
    def note_signal(cls, _number: int, _frame: object) -> None:
        """Take the signal in."""
        cls.is_set = True


def write_report(facts: dict[str, Any]) -> None:
    """Write a report. One write of a short line is not mixed with other output."""
    text = REPORT + json.dumps(facts, allow_nan=False, sort_keys=True) + "\n"
    sys.stdout.flush()
    os.write(1, text.encode())


def fail(reason: str, message: str) -> NoReturn:
    """End with status 1, and report why. ``reason`` is one of those of ``tessera.progress.fail``."""
    write_report({"failure": {"reason": reason, "message": message[:MAX_MESSAGE]}})
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(1)


def read_document(text: str) -> dict[str, Any]:
    """Return the document of standard input, which has a method, a plan and a cluster."""
    try:
        document = json.loads(text)
        kind = document["method"]["kind"]
        nodes, gpus = document["cluster"]["num_nodes"], document["cluster"]["num_devices_per_node"]
    except (ValueError, KeyError, TypeError) as error:
        fail("refused", f"the document of the plan cannot be read: {error!r}")
    if kind not in METHODS or not isinstance(nodes, int) or not isinstance(gpus, int):
        fail(
            "refused",
            f"the document of the plan has the method {kind!r}, which is unknown",
        )
    return dict(document)


def make_shard_parallel(values: dict[str, Any]) -> Any:
    """Return Alpa's method for a plan of one stage. Without a shape, Alpa chooses one."""
    devices = None
    if values["logical_shape"] is not None:
        mesh = alpa.get_global_physical_mesh(create_if_not_exist=True)
        devices = mesh.get_logical_mesh(mesh_shape=tuple(values["logical_shape"]))
    return alpa.ShardParallel(
        devices=devices,
        num_micro_batches=values["num_micro_batches"],
        auto_sharding_option=alpa.AutoShardingOption(**values["auto_sharding_option"]),
    )


def make_pipeshard_parallel(values: dict[str, Any]) -> Any:
    """Return Alpa's method for a plan of several stages, or of one that computes layers again."""
    stages = values["stage_option"]
    return alpa.PipeshardParallel(
        num_micro_batches=values["num_micro_batches"],
        default_auto_sharding_option=alpa.AutoShardingOption(
            **values["default_auto_sharding_option"]
        ),
        pipeline_schedule=values["pipeline_schedule"],
        layer_option=alpa.ManualLayerOption(**values["layer_option"]),
        stage_option=alpa.ManualStageOption(
            forward_stage_layer_ids=stages["forward_stage_layer_ids"],
            submesh_physical_shapes=stages["submesh_physical_shapes"],
            submesh_logical_shapes=stages["submesh_logical_shapes"],
            submesh_autosharding_option_dicts=stages["submesh_autosharding_option_dicts"],
        ),
    )


METHODS = {"ShardParallel": make_shard_parallel, "PipeshardParallel": make_pipeshard_parallel}


def load_program(words: list[str]) -> Any:
    """Return the module of the program, which sees its own arguments in ``sys.argv``."""
    is_module, names = words[0] == "-m", words[1:] if words[0] == "-m" else words
    sys.argv = list(names)
    if is_module:
        sys.path.insert(0, os.getcwd())
        module: Any = importlib.import_module(names[0])
    else:
        path = os.path.abspath(names[0])
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location("tessera_alpa_program", path)
        if spec is None or spec.loader is None:
            fail("refused", f"the program {names[0]} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    if not callable(getattr(module, "build", None)):
        fail("refused", f"the program {names[0]} defines no function build(plan); define it")
    return module


def asked_checkpoints() -> int:
    """Return the number of the latest request for a checkpoint."""
    try:
        with open(os.environ["TESSERA_CONTROL_FILE"], encoding="utf-8") as file:
            return int(json.load(file)["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # it is not there yet


def save_state(state: Any, iterations: int, executable: Any) -> None:
    """Write a checkpoint, and report it once all workers have written their parts.

    Alpa's workers write in the background, and no error of theirs reaches this process. They do
    one thing after the other, so a call that all have answered comes after the writing.
    """
    path = os.path.join(os.environ["TESSERA_CHECKPOINT_DIR"], f"iteration-{iterations}")
    alpa.save_checkpoint(path, state, iterations)
    executable.sync()
    for folder in sorted(os.listdir(path)):
        parts = os.path.join(path, folder)
        if os.path.isdir(parts) and not any(n.startswith("metadata_") for n in os.listdir(parts)):
            raise OSError(f"no worker wrote {parts}; does every node see this directory?")
    write_report({"checkpoint": {"iterations": iterations, "path": path}})


def restore_state(executable: Any, iterations: int) -> Any:
    """Return the state of the checkpoint to go on from, divided as the executable needs it."""
    path = os.environ["TESSERA_RESUME_FROM"]
    specs = executable.get_input_placement_specs()[0]
    try:
        return alpa.restore_checkpoint(path, iterations, specs)
    except (OSError, ValueError, KeyError) as error:
        fail("bad_checkpoint", f"the checkpoint {path} cannot be restored: {error!r}")


def train_model(document: dict[str, Any], program: Any) -> None:
    """Train until the last iteration, or until SIGTERM."""
    train_step, state, make_batch = program.build(document.get("plan"))
    method = METHODS[document["method"]["kind"]](document["method"])
    step = alpa.parallelize(train_step, donate_argnums=(0,), batch_argnums=(1,), method=method)
    start = int(os.environ.get("TESSERA_RESUME_ITERATIONS", "0"))
    total = int(float(os.environ["TESSERA_ITERATIONS"]))
    if os.environ.get("TESSERA_RESUME_FROM"):
        state = restore_state(step.get_executable(state, make_batch(start)), start)
    answered = 0
    for iteration in range(start, total):
        state, loss = step(state, make_batch(iteration))
        done, value = iteration + 1, float(getattr(loss, "_value", loss))
        is_finite = math.isfinite(value)
        write_report({"iterations": done, "loss": value if is_finite else str(value)})
        if not is_finite and getattr(program, "STOP_IF_NOT_FINITE", True):
            fail("loss_not_finite", f"the loss of iteration {done} is {value}")
        stops, asked = StopFlag.is_set, asked_checkpoints()
        if stops or asked > answered:
            save_state(state, done, step.get_last_executable())
            answered = asked
        if stops:
            return


def run_ray(*words: str) -> None:
    """Start Ray's processes on this node. They go on, and end with the job's other processes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
    if subprocess.call(command, stdin=subprocess.DEVNULL):
        raise RuntimeError("Ray did not start on this node; its own message is above")


class Meeting:
    """The files by which the nodes of a gang learn of each other."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def show_file(self, name: str) -> None:
        """Write the file ``name``."""
        os.makedirs(self._folder, exist_ok=True)
        with open(os.path.join(self._folder, name), "w", encoding="ascii"):
            pass

    def wait_for(self, name: str, *, heeds_stop: bool) -> bool:
        """Wait for a file of another node; return False if it ``heeds_stop`` and SIGTERM came."""
        while not os.path.exists(os.path.join(self._folder, name)):
            if heeds_stop and StopFlag.is_set:
                return False
            time.sleep(PAUSE_S)
        return True


def lead_nodes(document: dict[str, Any], words: list[str], meeting: Meeting) -> None:
    """Start Ray's head, wait for the other nodes, and train."""
    cluster = document["cluster"]
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    gpus = os.environ["TESSERA_NODE_GPUS"]
    run_ray(
        *("--head", "--node-ip-address", address, "--port", port, "--num-gpus", gpus),
        *("--include-dashboard", "false"),
    )
    os.environ["RAY_ADDRESS"] = f"{address}:{port}"
    meeting.show_file(HEAD)
    for rank in range(1, cluster["num_nodes"]):
        if not meeting.wait_for(f"node-{rank}", heeds_stop=True):
            return
    alpa.init(
        cluster="ray",
        num_nodes=cluster["num_nodes"],
        num_devices_per_node=cluster["num_devices_per_node"],
    )
    train_model(document, load_program(words))
    alpa.shutdown()


def join_leader(rank: int, meeting: Meeting) -> None:
    """Join Ray's head, and stay until the first node has ended."""
    if not meeting.wait_for(HEAD, heeds_stop=True):
        return
    address = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    run_ray("--address", address, "--num-gpus", os.environ["TESSERA_NODE_GPUS"])
    meeting.show_file(f"node-{rank}")
    meeting.wait_for(ENDED, heeds_stop=False)  # the first one needs this node for its checkpoint


def main() -> None:
    """Run this node's part of the job."""
    signal.signal(signal.SIGTERM, StopFlag.note_signal)
    document = read_document(sys.stdin.read())
    rank = int(os.environ["TESSERA_NODE_RANK"])
    meeting = Meeting(os.path.join(os.environ["TESSERA_CHECKPOINT_DIR"], ".alpa"))
    if rank:
        join_leader(rank, meeting)
        return
    try:
        lead_nodes(document, sys.argv[1:], meeting)
    finally:
        meeting.show_file(ENDED)


if __name__ == "__main__":
    main()
