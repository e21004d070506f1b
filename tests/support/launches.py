"""A launch that states everything, as value and as message."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration

from tessera.formulation.job.launch import LaunchSpec, SecretVariable
from tessera.formulation.job.runtimes import TORCHRUN
from tessera.v1 import launch_pb2

DURATIONS: Final = ("stall_limit", "stop_grace", "tuning_budget")


def launch_message(launch: LaunchSpec) -> launch_pb2.Launch:
    """Return the message of a launch, with the runtime that it names."""
    plain = launch.to_plain()
    message = launch_pb2.Launch()
    for name in DURATIONS:
        if seconds := plain.pop(f"{name}_s", 0.0):
            getattr(message, name).FromNanoseconds(round(seconds * 1e9))
    message.MergeFrom(launch_pb2.Launch(**plain))
    return message


WHOLE_LAUNCH: Final = LaunchSpec(
    runtime=TORCHRUN,
    env={"NCCL_DEBUG": "INFO", "GREETING": "a b=ü", "EMPTY": ""},
    workdir="/srv/train",
    secrets=(SecretVariable(variable="WANDB_API_KEY", name="wandb"),),
    staging_command=("cp", "-r", "/data/a b", "/scratch"),
    user="ana",
    progress_pattern=r"iteration +(?P<iteration>\d+).*?loss: (?P<loss>[0-9.]+)",
    stall_limit_s=1800.0,
    stop_grace_s=90.5,
    until_exit=True,
)
"""A launch with all fields but the image, which no runtime of this release uses."""

WHOLE_MESSAGE: Final = launch_pb2.Launch(
    runtime=TORCHRUN,
    env=WHOLE_LAUNCH.env,
    workdir="/srv/train",
    secrets=[launch_pb2.Secret(variable="WANDB_API_KEY", name="wandb")],
    staging_command=WHOLE_LAUNCH.staging_command,
    user="ana",
    progress_pattern=WHOLE_LAUNCH.progress_pattern,
    stall_limit=Duration(seconds=1800),
    stop_grace=Duration(seconds=90, nanos=500_000_000),
    until_exit=True,
)
"""``WHOLE_LAUNCH`` as a message."""
