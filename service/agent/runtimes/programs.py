"""The runtimes that train: each runs a user's program under a keeper on every node of the gang."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import secrets
import signal
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ExecutionPlan, read_execution_plan
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.runtimes import RUNTIMES
from tessera.service.agent.files import (
    PASSAGE,
    change_mode,
    give_folder,
    make_private,
    read_start,
    read_trusted,
    write_json,
    write_text,
)
from tessera.service.agent.gangs import read_launch
from tessera.service.agent.hardware.host import find_host_bytes
from tessera.service.agent.isolation import (
    UnsuitableNode,
    UserRule,
    make_cgroup,
    read_secrets,
    remove_cgroup,
    require_entrance,
    share_of_cores,
    visible_devices,
)
from tessera.service.agent.keeper import main as keeper
from tessera.service.agent.keeper import rank_program
from tessera.service.agent.keeper.spec import (
    ADDRESS,
    PORT,
    KeeperSpec,
    LaunchArguments,
    ProgramUser,
)
from tessera.service.agent.keeper.trainer import (
    AUTHORITY_FILE,
    TOKEN_FILE,
    trainer_variables,
)
from tessera.service.agent.lease import LEASE_FILE
from tessera.service.agent.logs import claim_folder, folder_of
from tessera.service.agent.process import python_argv, read_identity, remove_secrets
from tessera.service.agent.runtimes.arguments.layout import RankLayout
from tessera.service.agent.runtimes.handle import STOP_SIGNALS, ProcessHandle
from tessera.service.agent.runtimes.protocol import Member, MemberExit, MemberHandle
from tessera.service.agent.runtimes.templates import TEMPLATES
from tessera.service.agent.strays import (
    MARK_FILE,
    MARK_VARIABLE,
    end_strays,
    find_mark,
    kill_keeper,
)
from tessera.service.agent.trainer_certificate import (
    CERTIFICATE_FILE,
    KEY_FILE,
    CertificateSource,
)
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

LOGS: Final = "logs"
"""The folder of the output of jobs, in the agent's data directory."""

TUNING_FILE: Final = "tuning.json"
"""The file with the plans that a program may try at launch, and the budget for that."""

OPEN_FOLDER: Final = 0o755
OPEN_FILE: Final = 0o644
"""The modes of what programs of other users may read. Only its token in an inbox is secret."""

MAX_TOKEN_BYTES: Final = 100

CLIENT_MODULES: Final = ("progress", "plans", "jax")
"""The modules of tessera-client that programs may import without installing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """The decisions of an agent's operator about users' programs.

    ``environment`` is the agent's own. ``nodes`` has the number of GPUs of each of its nodes. The
    node is reached by others under ``address``. ``refusal`` says why this agent runs no programs at
    all; it is "" if it does.
    """

    data_dir: Path
    address: str
    nodes: Mapping[str, int]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    users: UserRule = field(default_factory=UserRule)
    secrets: Path | None = None
    python: str = "python3"  # interpreter of scripts
    grace_s: float = 30.0
    checkpoint_s: float = 600.0
    log_bytes: int = 64 << 20
    refusal: str = ""
    certificates: CertificateSource | None = None
    """The source of the certificate with which Trainer's reports are received. None: they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStart:
    """A start of a member's program: the member, and what follows from it, each read once."""

    member: Member
    launch: LaunchSpec
    plan: ExecutionPlan | None  # None if none was recorded
    user: ProgramUser
    secrets: Mapping[str, str] = field(repr=False)  # values by variable
    layout: RankLayout
    arguments: LaunchArguments
    tuning_s: float  # for which the program may try plans; 0 if it has none to try
    mark: str  # found in the environment of each of its processes

    @property
    def inbox(self) -> Path:
        """Return the folder that the program reads."""
        return _inbox(self.member)

    @property
    def outbox(self) -> Path:
        """Return the folder that the program writes."""
        return _outbox(self.member)

    @property
    def owner(self) -> tuple[int, int] | None:
        """Return the user and the group of the program's files, or None for the agent's own."""
        return (self.user.uid, self.user.gid) if self.user.uid != os.geteuid() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRuntime:
    """The runtime ``name``, which launches programs by the template of that name."""

    name: str
    settings: ProgramSettings

    @property
    def leader_only(self) -> bool:
        """Return that each node of the gang has processes of its own."""
        return False

    def launch(self, member: Member) -> MemberHandle:
        """Check the member, write the files that its program reads, and start its keeper.

        Raises:
            UnsuitableNode: the program cannot be run here.
            InvalidInput: this runtime cannot run the command or the plan.
            OSError: a file cannot be written or read, or the keeper could not be started.
        """
        start = self.derive_start(member)
        self._write_files(start)
        write_json(str(member.directory / MARK_FILE), {"mark": start.mark})
        return KeeperHandle.spawn(
            python_argv(Path(keeper.__file__)),
            self._spec(start).to_plain(),
            member.directory,
            {"PATH": os.defpath, "LANG": "C.UTF-8"},
            blocked=(*STOP_SIGNALS, signal.SIGUSR1),
        )

    def adopt(self, directory: Path) -> MemberHandle | None:
        """Return the handle of the keeper that an earlier agent started there, or None."""
        return KeeperHandle.adopt(directory)

    def derive_start(self, member: Member) -> ProgramStart:
        """Return a start of the member's program. Raises UnsuitableNode, InvalidInput."""
        gang, settings = member.gang, self.settings
        if settings.refusal:
            raise UnsuitableNode("runtime", settings.refusal)
        launch = read_launch(gang)
        RUNTIMES[self.name].check_command("command", gang.command)
        plan = self._plan(gang)
        user = settings.users.choose(launch.user, os.geteuid())
        values = read_secrets(settings.secrets, gang.tenant, launch.secrets)
        if launch.image:
            raise InvalidInput("launch.image", "needs an engine that runs containers")
        layout = self._layout(member, launch)
        arguments = TEMPLATES[self.name](layout, gang.command, plan, gang.global_batch)
        return ProgramStart(
            member=member,
            launch=launch,
            plan=plan,
            user=user,
            secrets=values,
            layout=layout,
            arguments=arguments.place_files(str(_inbox(member))),
            tuning_s=launch.tuning_s if gang.tuning_plans and RUNTIMES[self.name].tunes else 0.0,
            mark=uuid.uuid4().hex,
        )

    def _plan(self, gang: pb.DesiredGang) -> ExecutionPlan | None:
        """Return the gang's execution plan, or None if none was recorded. Raises InvalidInput."""
        if not gang.execution_plan:
            if gang.pipeline_degree > 1 and not RUNTIMES[self.name].runs_any_plan:
                raise InvalidInput(
                    "execution_plan",
                    f"is missing for {gang.pipeline_degree} pipeline stages; state a plan, or delete"
                    " the Cell so that the server derives one with a plan",
                )
            return None
        plan = read_execution_plan("execution_plan", gang.execution_plan)
        if problem := RUNTIMES[self.name].refuse_plan(plan):
            raise InvalidInput(
                "execution_plan",
                f"{problem}, so {self.name} cannot run it; state another plan or runtime",
            )
        return plan

    def _layout(self, member: Member, launch: LaunchSpec) -> RankLayout:
        devices = visible_devices(self.settings.environment, member.gpus)["CUDA_VISIBLE_DEVICES"]
        return RankLayout(
            node_rank=member.rank,
            member_gpus=tuple(member.gang.member_gpus),
            address=ADDRESS,
            port=PORT,
            python=self.settings.python,
            rank_program=(
                self.settings.python,
                rank_program.__file__,
                str(_inbox(member)),
                str(_outbox(member)),
            ),
            devices=tuple(devices.split(",")),
            stop_grace_s=launch.stop_grace_s or self.settings.grace_s,
        )

    def _write_files(self, start: ProgramStart) -> None:
        """Make the member's directories and files. Raises InvalidInput (plans to try), OSError."""
        gang, inbox = start.member.gang, start.inbox
        claim_folder(self.settings.data_dir / LOGS, gang.job, gang.job_number)
        self._make_boxes(start)
        self._write_trainer_files(start)
        texts = dict(start.arguments.files)
        if gang.execution_plan:
            texts["plan.json"] = gang.execution_plan
        if start.tuning_s:
            plans = [json.loads(_canonical(text)) for text in gang.tuning_plans]
            texts[TUNING_FILE] = json.dumps({"budget_s": start.tuning_s, "plans": plans})
        for name, text in texts.items():
            write_text(str(inbox / name), text, mode=OPEN_FILE)
        copy_client(inbox / "site")

    def _make_boxes(self, start: ProgramStart) -> None:
        """Make the directories through which the program and its keeper communicate."""
        member, user = start.member, start.user
        top, shared = self.settings.data_dir, member.store.parent
        make_private(str(start.inbox), OPEN_FOLDER)
        if start.owner is None:
            make_private(str(start.outbox))
            make_private(str(shared))
            return
        give_folder(str(start.outbox), *start.owner)
        make_private(str(shared), PASSAGE)
        change_mode(str(shared), PASSAGE)
        for inner in (member.directory, shared):
            for path in (inner, *inner.parents):
                if path.is_relative_to(top):
                    change_mode(str(path), PASSAGE)
        require_entrance(member.directory, user)
        require_entrance(shared, user)

    def _write_trainer_files(self, start: ProgramStart) -> None:
        """Write the files with which Hugging Face's Trainer can report to the keeper."""
        source, inbox = self.settings.certificates, start.inbox
        certificate = source.find() if source is not None and start.member.leads else None
        if certificate is None:
            return
        certificate.write_files(str(start.member.directory))
        write_text(str(inbox / AUTHORITY_FILE), certificate.certificate, mode=OPEN_FILE)
        write_text(str(inbox / TOKEN_FILE), secrets.token_urlsafe(32), owner=start.owner)

    def _spec(self, start: ProgramStart) -> KeeperSpec:
        member, settings, arguments = start.member, self.settings, start.arguments
        gang, gpus = member.gang, settings.nodes.get(member.node, 0)
        variables = {**self.environment(start), **arguments.environment}
        return KeeperSpec(
            runtime=self.name,
            job=gang.job,
            generation=gang.generation,
            job_number=gang.job_number,
            node_rank=member.rank,
            nodes=len(gang.members),
            ranks=self._ranks(start),
            ranks_are_gpus=RUNTIMES[self.name].ranks_are_gpus,
            last_rank_reports=RUNTIMES[self.name].last_rank_reports,
            iterations_total=gang.iterations_total,
            iter_time_s=gang.iter_time_s,
            launch=start.launch,
            arguments=replace(arguments, environment=variables, files={}),
            user=start.user,
            directory=str(member.directory),
            store=str(member.store),
            logs=str(folder_of(settings.data_dir / LOGS, gang.job, gang.generation)),
            mark=start.mark,
            lease=str(settings.data_dir / LEASE_FILE),
            address=settings.address,
            cores=share_of_cores(sorted(os.sched_getaffinity(0)), member.gpus, gpus),
            cgroup=_cgroup(start, gpus),
            tuning_s=start.tuning_s,
            grace_s=start.layout.stop_grace_s,
            checkpoint_s=settings.checkpoint_s,
            log_bytes=settings.log_bytes,
            **_trainer_proof(start),
        )

    def _ranks(self, start: ProgramStart) -> tuple[int, ...]:
        """Return the global ranks on the member's node."""
        layout = start.layout
        if not RUNTIMES[self.name].ranks_are_gpus:
            return (layout.node_rank,)
        before = sum(layout.member_gpus[: layout.node_rank])
        return tuple(range(before, before + layout.node_gpus))

    def environment(self, start: ProgramStart) -> dict[str, str]:
        """Return the program's environment, except what only its keeper and its template know."""
        member, launch, user, inbox = start.member, start.launch, start.user, start.inbox
        gang = member.gang
        stated = dict(launch.env)
        paths = [str(inbox / "site"), *filter(None, [stated.pop("PYTHONPATH", "")])]
        variables = {
            **remove_secrets(self.settings.environment),
            **self._thread_variables(start),
            "HOME": user.home,
            "USER": user.name,
            "LOGNAME": user.name,
            **stated,
            **start.secrets,
            **member.environment,
            **visible_devices(self.settings.environment, member.gpus),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": stated.get("PYTHONUNBUFFERED", "1"),
            MARK_VARIABLE: start.mark,
            "TESSERA_JOB": gang.job,
            "TESSERA_GENERATION": str(gang.generation),
            "TESSERA_NODE_RANK": str(member.rank),
            "TESSERA_NODES": str(len(gang.members)),
            "TESSERA_NODE_GPUS": str(len(member.gpus)),
            "TESSERA_GPUS": str(start.layout.gpus),
            "TESSERA_ITERATIONS": f"{gang.iterations_total:.0f}",
            "TESSERA_GLOBAL_BATCH": str(gang.global_batch),
        }
        if gang.array_size:
            variables["TESSERA_ARRAY_INDEX"] = str(gang.array_index)
            variables["TESSERA_ARRAY_SIZE"] = str(gang.array_size)
        if gang.execution_plan:
            variables["TESSERA_PLAN_FILE"] = str(inbox / "plan.json")
        if start.tuning_s:
            variables["TESSERA_TUNING_FILE"] = str(inbox / TUNING_FILE)
        if _trainer_proof(start):
            offered = trainer_variables(gang.job, str(inbox), variables)
            variables |= {
                name: value
                for name, value in offered.items()
                if name not in stated or name.lower() == "no_proxy"
            }
        return variables

    def _thread_variables(self, start: ProgramStart) -> dict[str, str]:
        """Return the number of threads of each process, if the plan states the cores of its GPUs."""
        cores = 0 if start.plan is None else start.plan.cpus_on(len(start.member.gpus))
        return {"OMP_NUM_THREADS": str(cores // len(self._ranks(start)))} if cores else {}


class KeeperHandle(ProcessHandle):
    """A keeper, and the processes that it leaves behind if it is killed."""

    def request_checkpoint(self) -> None:
        """Ask the program to write a checkpoint and go on."""
        self.process.signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the program and all that it started, and then the keeper."""
        try:
            keeper = read_identity(self.directory / "process.json")
        except (OSError, TypeError, ValueError):
            keeper = None  # end_strays does what it can
        if keeper is not None:
            kill_keeper(keeper)
        super().kill()

    async def ended(self) -> MemberExit:
        """Return how the program ended, once all of its processes are dead."""
        exited = await super().ended()
        await end_strays(self.directory)
        if mark := find_mark(self.directory):
            remove_cgroup(_cgroup_name(mark))
        return exited


def _trainer_proof(start: ProgramStart) -> dict[str, Any]:
    """Return what a keeper needs to receive Trainer's reports, or {} if it cannot."""
    directory = start.member.directory
    paths = directory / CERTIFICATE_FILE, directory / KEY_FILE
    if not all(path.exists() for path in paths):
        return {}
    token = read_start(str(start.inbox / TOKEN_FILE), MAX_TOKEN_BYTES).decode("ascii")
    return {"certificate": tuple(map(str, paths)), "trainer_token": token}


def _canonical(text: str) -> str:
    """Return the canonical JSON of a plan to try. Raises InvalidInput."""
    return read_execution_plan("tuning_plans", text).to_json()


def _cgroup(start: ProgramStart, node_gpus: int) -> str:
    """Return the cgroup that limits the member's host memory, or "" where none can."""
    if not node_gpus:
        return ""
    share = find_host_bytes() * len(start.member.gpus) // node_gpus
    group = make_cgroup(_cgroup_name(start.mark), share)
    return str(group) if group else ""


def _cgroup_name(mark: str) -> str:
    return f"tessera-{mark}"


def _inbox(member: Member) -> Path:
    return member.directory / "in"


def _outbox(member: Member) -> Path:
    return member.directory / "out"


def copy_client(site: Path) -> None:
    """Put the modules that programs may import where the program finds them. None is imported."""
    for name in CLIENT_MODULES:
        found = importlib.util.find_spec(f"tessera.{name}")
        if found is None or found.origin is None:
            raise FileNotFoundError(
                f"tessera.{name} is not installed; install tessera-client again"
            )
        folder = site / "tessera" / name
        make_private(str(folder), OPEN_FOLDER)
        for file in Path(found.origin).parent.glob("*.py"):
            write_text(str(folder / file.name), read_trusted(file), mode=OPEN_FILE)
