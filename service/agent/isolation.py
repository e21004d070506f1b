"""The separation of jobs' programs on a node: users, GPUs, cores, host memory and secrets."""

from __future__ import annotations

import logging
import os
import pwd
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.launch import SecretVariable
from tessera.service.agent.files import (
    make_private,
    read_start,
    read_trusted,
    remove_folder,
    write_setting,
)
from tessera.service.agent.keeper.spec import ProgramUser

log = logging.getLogger(__name__)

VISIBILITY_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that select the GPUs visible to a process, for NVIDIA's and AMD's libraries."""

MAX_SECRET_BYTES: Final = 65_536

SHARE_OF_MEMORY: Final = 0.95
"""The share of the host memory that programs may use in all."""

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
"""Where version 2 of cgroups is mounted, if it is the machine's only version."""


class UnsuitableNode(InvalidInput):
    """This node cannot run the job. Another node may."""

    reason = "UNSUITABLE_NODE"


class UnfitNode(UnsuitableNode):
    """This node can run no program of this user until it is mended, whatever the job."""

    reason = "UNFIT_NODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRule:
    """The users that an agent runs programs as.

    ``default`` is that of jobs that name none. If it is "", it is the agent's own user, which must
    not be root. ``allowed`` are those that jobs may name. An agent that is not root has only its own
    user.
    """

    default: str = ""
    allowed: tuple[str, ...] = ()

    def choose(self, wanted: str, own_uid: int) -> ProgramUser:
        """Return the user for a job that names ``wanted``, or none ("").

        Raises:
            UnsuitableNode: the agent must not or cannot run programs as this user. It is an UnfitNode
                if the agent has no user at all for programs.
        """
        own = find_user(own_uid)
        name = wanted or self.default or own.name
        if own_uid != 0:
            if name != own.name:
                raise UnsuitableNode(
                    "launch.user",
                    f"is {name}, but this agent runs as {own.name} and can run programs only as that"
                    " user; start the agent as root",
                )
            return own
        if not (wanted or self.default):
            refusal = UnsuitableNode if self.allowed else UnfitNode
            raise refusal(
                "launch.user",
                "is needed, because this agent runs as root; start it with --run-as USER, or name a"
                " user that it allows",
            )
        if wanted and wanted != self.default and wanted not in self.allowed:
            raise UnsuitableNode(
                "launch.user",
                f"must not be {wanted} on this node; ask for --allow-user {wanted} on its agent",
            )
        try:
            return find_user(name)
        except UnsuitableNode as error:
            if wanted:
                raise
            raise UnfitNode("--run-as", error.problem) from error


def find_user(name_or_uid: str | int) -> ProgramUser:
    """Return a user of this machine. Raises UnsuitableNode."""
    try:
        named = pwd.getpwnam if isinstance(name_or_uid, str) else pwd.getpwuid
        entry = named(name_or_uid)  # type: ignore[arg-type]
    except KeyError:
        raise UnsuitableNode(
            "launch.user", f"{name_or_uid} does not exist on this node; create the user"
        ) from None
    return ProgramUser(
        name=entry.pw_name,
        uid=entry.pw_uid,
        gid=entry.pw_gid,
        groups=tuple(os.getgrouplist(entry.pw_name, entry.pw_gid)),
        home=entry.pw_dir,
    )


def require_entrance(path: Path, user: ProgramUser) -> None:
    """Check that ``user`` can enter ``path`` and the directories above it.

    Raises:
        UnfitNode: it cannot, so its programs could not read or write their files.
    """
    if user.uid == 0:
        return
    for directory in (path, *path.parents):
        status = directory.stat()
        if status.st_uid == user.uid:
            may = status.st_mode & stat.S_IXUSR
        elif status.st_gid in (user.gid, *user.groups):
            may = status.st_mode & stat.S_IXGRP
        else:
            may = status.st_mode & stat.S_IXOTH
        if not may:
            raise UnfitNode(
                "--run-as",
                f"{user.name} cannot enter {directory} (mode {stat.S_IMODE(status.st_mode):o}), where its"
                f" programs have their files; run `chmod o+x {directory}`, or choose other directories for"
                " --data-dir and --checkpoint-dir",
            )


def visible_devices(own: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables that make only ``gpus`` visible, by their places among the agent's own."""
    variables = {}
    for name in VISIBILITY_VARIABLES:
        seen = [text.strip() for text in own.get(name, "").split(",") if text.strip()]
        chosen = [seen[gpu] if gpu < len(seen) else str(gpu) for gpu in gpus]
        variables[name] = ",".join(chosen)
    return variables


def share_of_cores(cores: Sequence[int], gpus: Sequence[int], node_gpus: int) -> tuple[int, ...]:
    """Return the cores that belong to ``gpus``, of a node with ``node_gpus`` GPUs and ``cores``.

    Each GPU has an equal part of the cores, in order. With fewer cores than GPUs, or GPUs that the
    node does not have, all cores are returned: a program without a core could not run.
    """
    if len(cores) < node_gpus or not gpus or max(gpus) >= node_gpus:
        return tuple(cores)
    ordered = sorted(cores)
    bounds = [len(ordered) * k // node_gpus for k in range(node_gpus + 1)]
    return tuple(core for gpu in sorted(gpus) for core in ordered[bounds[gpu] : bounds[gpu + 1]])


def read_secrets(
    directory: Path | None, tenant: str, secrets: Sequence[SecretVariable]
) -> dict[str, str]:
    """Return the values of the secrets of a tenant, by variable. Never log the result.

    Raises:
        UnsuitableNode: the agent has no secrets, or a secret does not exist or cannot be used.
        InvalidInput: the tenant's name is not that of a folder.
    """
    if not secrets:
        return {}
    if directory is None:
        raise UnsuitableNode(
            "launch.secrets", "cannot be read: this agent was started without --secrets-dir"
        )
    folder = tenant or "default"
    if "/" in folder or folder in (".", ".."):
        raise InvalidInput("tenant", f"{tenant!r} cannot have secrets, because of its name")
    values = {}
    for secret in secrets:
        path = directory / folder / secret.name
        try:
            text = read_start(str(path), MAX_SECRET_BYTES + 1).decode()
        except (OSError, ValueError) as error:
            problem = "does not exist" if isinstance(error, FileNotFoundError) else "cannot be read"
            raise UnsuitableNode(
                "launch.secrets", f"{secret.name} {problem} on this node; put it into {path.parent}"
            ) from error
        if len(text) > MAX_SECRET_BYTES or "\0" in text:
            raise UnsuitableNode("launch.secrets", f"{secret.name} is no text of at most 64 KiB")
        values[secret.variable] = text.rstrip("\r\n")
    return values


def make_cgroup(name: str, memory_bytes: int, root: Path = CGROUP_ROOT) -> Path | None:
    """Make a cgroup (version 2) that limits host memory; return it, or None if that is not allowed.

    It is made below the agent's own cgroup or next to it, wherever the memory controller was
    delegated to the agent.
    """
    for above in _own_cgroups(root):
        group = above / name
        try:
            if not _passes_memory_on(above):
                continue
            make_private(str(group), 0o755)  # programs may read their limits
            write_setting(str(group / "memory.max"), str(memory_bytes))
        except OSError as error:
            log.debug(
                "cannot limit memory by this cgroup",
                extra={"event": "memory_not_limited", "cgroup": group, "error": error},
            )
            continue
        return group
    return None


def remove_cgroup(name: str, root: Path = CGROUP_ROOT) -> None:
    """Remove a cgroup that ``make_cgroup`` made, if there is one. Its processes are dead."""
    for group in (above / name for above in _own_cgroups(root)):
        try:
            remove_folder(str(group))
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning(
                "cannot remove a cgroup",
                extra={"event": "cgroup_left", "cgroup": group, "error": error},
            )


def find_own_cgroup(root: Path = CGROUP_ROOT) -> Path | None:
    """Return the agent's own cgroup (version 2), or None if it cannot be found."""
    try:
        lines = read_trusted(Path("/proc/self/cgroup")).splitlines()
    except OSError as error:
        log.debug(
            "cannot read the agent's cgroup", extra={"event": "cgroup_unread", "error": error}
        )
        return None
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return root / paths[0] if paths else None


def _own_cgroups(root: Path) -> tuple[Path, ...]:
    """Return the agent's own cgroup and the one above, or nothing if they cannot be found."""
    own = find_own_cgroup(root)
    return () if own is None else (own, own.parent)


def _passes_memory_on(group: Path) -> bool:
    """Return whether cgroups below ``group`` can limit memory. Turn that on if we may.

    Raises OSError: we may not, or processes are in ``group``.
    """
    control = group / "cgroup.subtree_control"
    if "memory" in read_trusted(control).split():
        return True
    if "memory" not in read_trusted(group / "cgroup.controllers").split():
        return False
    write_setting(str(control), "+memory")
    return True
