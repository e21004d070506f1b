"""A problem stated in Python: GPUs, jobs and tenants, for which a round is decided."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, Self

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell, GpuType, Hold
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.objectives.values import ColumnValues
from tessera.formulation.round.policy import DEFAULT_OBJECTIVE
from tessera.formulation.state.snapshot import Allocations, Estimates, Jobs, Nodes, Snapshot
from tessera.modelling.additions import Additions, Speeds
from tessera.modelling.checks import (
    SpeedKey,
    read_cell,
    require_count,
    require_name,
    require_number,
)
from tessera.modelling.decide import decide
from tessera.modelling.files import read_snapshot, write_snapshot
from tessera.modelling.result import RoundResult
from tessera.solvers.schedulers.base import PublishedScheduler

NOW_S: Final = 1_500_000_000.0
"""The time of a new problem, in seconds since 1970. It is fixed, so that a problem repeats."""

_EMPTY: Final = Snapshot(
    cluster="model",
    epoch=1,
    round_number=1,
    now_s=NOW_S,
    gpu_types=(),
    nodes=Nodes.from_rows([]),
    workloads=(),
    plans=("",),
    estimates=Estimates.from_rows([]),
    jobs=Jobs.from_rows([]),
    allocations=Allocations.from_rows([]),
)


class Problem:
    """A cluster with its jobs, for which a round is decided in this process.

    It is a snapshot under construction, and has no model of its own: ``to_snapshot`` returns the
    snapshot that a server would read, and ``solve`` decides the round that a server would decide.
    A job's workload has one sample in an iteration, so that samples/s and iterations/s are equal.

    >>> problem = Problem()
    >>> problem.add_gpus("h100", nodes=4, gpus_per_node=8)
    >>> problem.add_job("bert", {("h100", 4): 70.0, ("h100", 8): 120.0}, samples=1e6)
    >>> problem.solve(objective="jct")["bert"].gpus
    8
    """

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        """Begin with the contents of ``snapshot``, or without GPUs and jobs at ``NOW_S``."""
        self._base, self._added = snapshot or _EMPTY, Additions()
        base = self._base
        self._gpu_types = {kind.name: kind for kind in base.gpu_types}
        self._type_of_node = {
            name: base.gpu_types[kind].name
            for name, kind in zip(base.nodes.name, base.nodes.gpu_type.tolist(), strict=True)
        }
        used = {
            (a["node"], a["gpu"]) for a in map(base.allocations.row, range(len(base.allocations)))
        }
        self._free = {
            name: [gpu for gpu in range(gpus) if (node, gpu) not in used]
            for node, (name, gpus) in enumerate(
                zip(base.nodes.name, base.nodes.gpus.tolist(), strict=True)
            )
        }
        self._jobs, self._tenants = set(base.jobs.name), set(base.tenants.name)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Self:
        """Return the problem of ``snapshot``, to which GPUs, jobs and tenants can be added."""
        return cls(snapshot)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the problem in a file of ``save`` or of `tessera replay --save-snapshot`.

        Raises:
            InvalidInput: the file cannot be read, or is not a saved snapshot.
        """
        return cls(read_snapshot(Path(path)))

    def save(self, path: str | Path) -> None:
        """Write the problem's snapshot to a file that `tessera solve` accepts.

        Raises:
            InvalidInput: the file cannot be written.
        """
        write_snapshot(Path(path), self.to_snapshot())

    def add_gpus(
        self,
        gpu_type: str,
        *,
        nodes: int,
        gpus_per_node: int,
        dollars_per_hour: float = 0.0,
        watts: float = 0.0,
    ) -> None:
        """Add ``nodes`` nodes with GPUs of one type, named e.g. ``h100-0``, ``h100-1`` and so on.

        ``dollars_per_hour`` and ``watts`` are those of one GPU, for the objective ``cost``; 0 means
        that they are not known.

        Raises:
            InvalidInput: a number has no meaning, or the type has another price already.
        """
        require_name("gpu_type", gpu_type)
        require_count("nodes", nodes, 1)
        require_count("gpus_per_node", gpus_per_node, 1)
        require_number("dollars_per_hour", dollars_per_hour, may_be_zero=True)
        require_number("watts", watts, may_be_zero=True)
        stated = dollars_per_hour, watts
        kind = GpuType(
            name=gpu_type, memory_bytes=0, dollars_per_hour=dollars_per_hour, watts=watts
        )
        known = self._gpu_types.setdefault(gpu_type, kind)
        if any(stated) and stated != (known.dollars_per_hour, known.watts):
            raise InvalidInput(
                "gpu_type", f"{gpu_type} has other dollars or watts already; state them once"
            )
        names = (name for k in count() if (name := f"{gpu_type}-{k}") not in self._free)
        for name in list(islice(names, nodes)):
            self._free[name] = list(range(gpus_per_node))
            self._type_of_node[name] = gpu_type
            self._added.nodes.append(
                {
                    "name": name,
                    "gpu_type": self._index_of_type("gpu_type", gpu_type),
                    "gpus": gpus_per_node,
                    "rack": "",
                    "schedulable": True,
                    "version": 1,
                }
            )

    def add_tenant(
        self,
        name: str,
        *,
        weight: float = 1.0,
        quotas: Mapping[str, int] | None = None,
        borrow_gpus: int = -1,
        keeps_idle_quota: bool = False,
    ) -> None:
        """Add a tenant. ``quotas`` has GPUs by type; the type ``""`` is any type.

        ``borrow_gpus`` is what it may hold beyond its quota; -1 for any number. If
        ``keeps_idle_quota``, others may not use its quota. A tenant that is not added has weight 1
        and no limits.

        Raises:
            InvalidInput: the tenant exists, a GPU type is not known, or a number has no meaning.
        """
        require_name("tenant", name)
        if name in self._tenants:
            raise InvalidInput("tenant", f"{name} was added already; add each tenant once")
        require_number("weight", weight, may_be_zero=True)
        require_count("borrow_gpus", borrow_gpus, -1)
        tenant, rows = len(self._tenants), []
        for gpu_type, gpus in (quotas or {}).items():
            require_count("quotas", gpus, 0)
            index = self._index_of_type("quotas", gpu_type) if gpu_type else -1
            rows.append({"tenant": tenant, "gpu_type": index, "gpus": gpus})
        self._tenants.add(name)
        self._added.quotas += rows
        self._added.tenants.append(
            {
                "name": name,
                "weight": weight,
                "borrow_gpus": borrow_gpus,
                "keeps_idle_quota": keeps_idle_quota,
            }
        )

    def add_job(
        self,
        name: str,
        speeds: Mapping[SpeedKey, float],
        *,
        samples: float,
        weight: float = 1.0,
        deadline_s: float = math.inf,
        requested_gpus: int | None = None,
        requested_gpu_type: str = "",
        tenant: str = "",
        priority: int = 1,
        guaranteed: bool = False,
        restart_s: float = 60.0,
        runs_on: Mapping[str, int] | None = None,
    ) -> None:
        """Add a job with its speed in samples/s on each Cell that it can run on.

        A key of ``speeds`` is a GPU type and a number of GPUs, e.g. ``("h100", 8)``, on the fewest
        nodes. A ``Cell`` also states nodes, pipeline degree or execution plan. ``samples`` is the
        work that is left. ``deadline_s`` counts from now; inf means no deadline.
        ``requested_gpus`` is by default the least number of GPUs in ``speeds``. ``restart_s`` is the
        time of a start or change. ``runs_on`` maps nodes to the number of their GPUs that the job
        holds now. Jobs with equal ``speeds`` share a workload.

        Raises:
            InvalidInput: the job exists, a GPU type or node is not known, a node lacks the GPUs, or a
                number has no meaning. The problem is then as it was.
        """
        require_name("job", name)
        if name in self._jobs:
            raise InvalidInput("job", f"{name} was added already; give each job a name of its own")
        cells = self._read_speeds(f"{name}.speeds", speeds)
        require_number(f"{name}.samples", samples)
        require_number(f"{name}.weight", weight, may_be_zero=True)
        require_number(f"{name}.restart_s", restart_s, may_be_zero=True)
        if not deadline_s > 0:
            raise InvalidInput(f"{name}.deadline_s", "must be above 0, because it counts from now")
        require_count(f"{name}.priority", priority, 1)
        if requested_gpus is None:
            requested_gpus = min(cell.gpus for cell, _ in cells)
        require_count(f"{name}.requested_gpus", requested_gpus, 1)
        kind = (
            self._index_of_type(f"{name}.requested_gpu_type", requested_gpu_type)
            if requested_gpu_type
            else -1
        )
        current = self._hold(f"{name}.runs_on", cells, runs_on) if runs_on else None
        self._jobs.add(name)
        self._added.workloads.setdefault(cells, name)
        self._added.jobs.append(
            {
                "name": name,
                "speeds": cells,
                "current": current,
                "iterations": samples,
                "iterations_left": samples,
                "requested_gpus": requested_gpus,
                "requested_gpu_type": kind,
                "tenant": tenant,
                "priority": priority,
                "weight": weight,
                "guaranteed": guaranteed,
                "deadline_s": self._base.now_s + deadline_s,
                "submit_s": self._base.now_s,
                "queued_s": self._base.now_s,
                "restart_s": restart_s,
            }
        )

    def to_snapshot(self) -> Snapshot:
        """Return the problem as the snapshot of a round."""
        return self._added.add_to(self._base, self._gpu_types.values())

    def solve(
        self,
        objective: str | Callable[[Draft], ColumnValues] = DEFAULT_OBJECTIVE,
        *,
        solver: str = "portfolio",
        scheduler: str | PublishedScheduler = "",
        time_limit_s: float = 60.0,
        **options: Any,
    ) -> RoundResult:
        """Decide a round, as a server would. The solver has ``time_limit_s``, which may be inf.

        Nothing comes after the round, so the objective alone chooses who starts: by default, no starts are
        planned for the jobs that wait.

        ``objective`` is one of the grammar, a plug-in in it, e.g. ``my_lab.values:running``, or a
        function. ``scheduler`` decides in place of the solver if it is given: the name of a published
        scheduler, a plug-in, or an object with ``name`` and ``choose``. ``options`` are further
        fields of ``tessera.solvers.rounds.options.RoundOptions``, e.g. ``deadlines="look-ahead"``.

        Raises:
            InvalidInput: there are no GPUs, an option is unknown or out of range, or the scheduler
                breaks a rule.
        """
        if not self._free:
            raise InvalidInput("gpus", "the problem has no GPUs; call add_gpus before solve")
        chosen = {"solver": solver, "promise_starts": False} | options
        return decide(self.to_snapshot(), objective, scheduler, time_limit_s, chosen)

    def _read_speeds(self, where: str, speeds: Mapping[SpeedKey, float]) -> Speeds:
        """Return the Cells of a job with their speeds. Raises InvalidInput."""
        cells: dict[Cell, float] = {}
        for key, samples_per_s in speeds.items():
            cell = read_cell(where, key)
            self._index_of_type(where, cell.gpu_type)
            require_number(f"{where}[{key}]", samples_per_s)
            if cell in cells:
                raise InvalidInput(where, f"states {cell.gpus} x {cell.gpu_type} twice")
            cells[cell] = samples_per_s
        if not cells:
            raise InvalidInput(where, 'must have a Cell that runs, e.g. {("h100", 8): 120.0}')
        return tuple(cells.items())

    def _hold(self, where: str, cells: Speeds, runs_on: Mapping[str, int]) -> Cell:
        """Give the next job GPUs of nodes, and return its Cell, the fastest that it may be.

        Raises:
            InvalidInput: a node is unknown or lacks the GPUs, or no Cell has this type and number.
        """
        for node, gpus in runs_on.items():
            if node not in self._free:
                raise InvalidInput(where, f"there is no node {node!r}; add_gpus names the nodes")
            require_count(f"{where}[{node}]", gpus, 1)
            if gpus > len(self._free[node]):
                raise InvalidInput(
                    where, f"{node} has {len(self._free[node])} GPUs free, not {gpus}"
                )
        kinds, total = {self._type_of_node[node] for node in runs_on}, sum(runs_on.values())
        fitting = [pair for pair in cells if {pair[0].gpu_type} == kinds and pair[0].gpus == total]
        if not fitting:
            held = f"{total} x {' and '.join(sorted(kinds))}"
            raise InvalidInput(where, f"holds {held}, for which the job has no speed; state it")
        job, nodes = len(self._jobs), list(self._free)
        for node, gpus in runs_on.items():
            taken, self._free[node] = self._free[node][:gpus], self._free[node][gpus:]
            index = nodes.index(node)
            self._added.allocations += [
                {"job": job, "node": index, "gpu": gpu, "hold": int(Hold.HELD), "generation": 1}
                for gpu in taken
            ]
        return max(fitting, key=lambda pair: pair[1])[0]

    def _index_of_type(self, where: str, gpu_type: str) -> int:
        if gpu_type not in self._gpu_types:
            known = ", ".join(self._gpu_types) or "none"
            raise InvalidInput(
                where, f"{gpu_type!r} is not a GPU type of the problem ({known}); add_gpus adds it"
            )
        return list(self._gpu_types).index(gpu_type)
