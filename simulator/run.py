"""The simulation of a scenario under a policy, with rounds until every job is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tessera.formulation.answer.decisions import CHANGES_GPUS, DecisionKind
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.plugins import is_reference
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.state.information import Information, all_estimates
from tessera.formulation.state.snapshot import STATES, Estimates, Snapshot
from tessera.simulator.hazards import Failure, Straggler
from tessera.simulator.log import Segment
from tessera.simulator.overheads import Overheads
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.world import Slowdowns, World
from tessera.solvers.base import Budget
from tessera.solvers.exact.cpsat import CpSat
from tessera.solvers.lookahead import ADMISSION
from tessera.solvers.plugins import require_kept_rules
from tessera.solvers.registry import make_solver as make_solver
from tessera.solvers.rounds.due import due_s, next_segment_s, next_start_s
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.rounds.times import RoundTimes
from tessera.solvers.schedulers.base import PublishedScheduler, Scheduler
from tessera.solvers.schedulers.registry import scheduler_of


class _CachedInformation:
    """A cache of the visible estimates, which is renewed only if the estimates change."""

    def __init__(self, information: Information) -> None:
        self._information = information
        self._told: Estimates | None = None
        self._seen: Estimates | None = None

    def __call__(self, snapshot: Snapshot) -> Snapshot:
        if self._seen is None or self._told is not snapshot.estimates:
            self._told = snapshot.estimates
            self._seen = self._information(snapshot).estimates
        return replace(snapshot, estimates=self._seen)


class Decider:
    """A decision maker for rounds, which calls ``plan_round`` with the visible information.

    No clock limits a round. CP-SAT works for at most ``work`` deterministic seconds in each call
    (about one real second), and all other steps end without a limit. A run therefore repeats bit
    for bit on any machine.
    """

    def __init__(
        self,
        options: RoundOptions,
        information: Information = all_estimates,
        work: float = 0.5,
        policy: PublishedScheduler | None = None,
        search: bool = True,
    ) -> None:
        """Build the solver, the scheduler and the budget of the rounds.

        If ``policy`` is given, it decides in place of the one that ``options.scheduler`` names.
        Without ``search``, look-ahead promises only what its first fits find, and CP-SAT does not
        look for more.
        """
        self.options = options
        self._sees: Information = (
            all_estimates if information is all_estimates else _CachedInformation(information)
        )
        self._solver = make_solver(options.solver)
        scheduler = (
            scheduler_of(options.scheduler, options.scheduler_parameters)
            if policy is None
            else Scheduler(published=policy)
        )
        self._scheduler = scheduler and replace(scheduler, information=self._sees)
        self._budget = Budget(
            remaining_s=lambda: math.inf,
            seed=options.seed,
            gap=options.gap,
            work={CpSat.name: work} | ({} if search else {ADMISSION: 0.0}),
        )

    def __call__(self, snapshot: Snapshot) -> RoundOutcome:
        """Decide a round.

        A published scheduler reads estimates through its information. Our own policies get a
        snapshot with those estimates.

        Raises:
            InvalidInput: a plug-in decides, and its decision breaks a rule.
        """
        if self._scheduler is None:
            snapshot = self._sees(snapshot)
        outcome = plan_round(
            snapshot, self.options, self._solver, self._budget, scheduler=self._scheduler
        )
        if is_reference(self.options.scheduler):
            require_kept_rules(
                f"{self.options.scheduler}, in round {snapshot.round_number},",
                [f"{v.rule}: {v.detail}" for v in outcome.violations],
            )
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of a run other than its scenario. They are the same for all compared policies."""

    overheads: Overheads = field(default_factory=Overheads)
    visible: Sequence[EstimateRecord] | None = None
    """The estimates that rounds see (``truth.perturb_estimates``). If it is None, rounds see the
    truth."""
    failures: Sequence[Failure] = ()
    stragglers: Sequence[Straggler] = ()
    round_s: float = 300.0
    on_events: bool = False
    """Whether rounds take place only when something has happened, at most one in each ``round_s``,
    or when promised schedules need one. Otherwise there is one every ``round_s``."""
    spacing_s: float | None = None
    """The least seconds between rounds on events, for rounds as a server has them with its settings
    ``round_spacing_s`` and ``period_s``. There is also one ``round_s`` after the last one, and one when
    a segment of a promised schedule begins. If it is None, it is ``round_s``, and there are no rounds
    without an event or a promise that would break."""
    horizon_s: float = math.inf
    """The time at which the run ends, even if jobs are left."""
    patience_s: float = 7 * 86_400.0
    """The seconds without a change after which a run ends, if no event is pending either."""
    slowdowns: Slowdowns | None = None
    """The slowdowns of jobs that share links of the network
    (``tessera.simulator.network.slowdowns``). If it is None, no job is slowed by others."""
    ended_early: Mapping[str, float] = field(default_factory=dict)
    """The share of its iterations, above 0 and at most 1, after which each of these jobs ends, by
    name: its user cancels it, or it fails. Rounds do not know it before."""
    measures: bool = False
    """Whether rounds see the true time of a Cell once a job has trained on it for a few iterations, as
    those of a service do. It matters only if ``visible`` estimates are wrong."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not (math.isfinite(self.round_s) and self.round_s > 0):
            raise InvalidInput("round_s", "must be a positive number of seconds")
        if self.spacing_s is not None and not (0 <= self.spacing_s < math.inf and self.on_events):
            raise InvalidInput(
                "spacing_s", "must be a number of seconds, and needs rounds on events"
            )
        if not all(0 < share <= 1 for share in self.ended_early.values()):
            raise InvalidInput("ended_early", "must have shares above 0 and at most 1")
        if not (self.horizon_s > 0 and self.patience_s > 0):
            raise InvalidInput("horizon_s", "the horizon and the patience must be above 0")

    def round_times(self) -> RoundTimes:
        """Return the rule for when rounds are due. Without ``on_events`` the clock asks for them."""
        if not self.on_events:
            return RoundTimes(spacing_s=0.0)
        if self.spacing_s is None:
            return RoundTimes(spacing_s=self.round_s)
        return RoundTimes(spacing_s=self.spacing_s, period_s=self.round_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """The record of a round.

    ``decide_s`` is real time, and the only number here that differs between runs. A round that was
    known to change nothing is not ``decided``. Its objective and gap are those of the last round
    that was decided.
    """

    at_s: float
    decide_s: float
    objective: float
    gap: float
    running: int
    waiting: int
    gpus: int  # GPUs held after the round, by profiling tasks, too
    changed: int  # starts, moves and changes
    suspended: int
    decided: bool = True
    bound_is_trivial: bool = False  # if so, the gap has no meaning


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """The outcome of a run.

    Arrays are by job in order of arrival; times are in seconds since the world began. Profiling
    tasks are not among the jobs, but held GPUs of the same cluster.
    """

    scenario: Scenario
    conditions: Conditions
    segments: tuple[Segment, ...]
    rounds: tuple[RoundRow, ...]
    arrival_s: Floats
    first_start_s: Floats  # inf: the job has never started
    start_by_s: Floats
    """Time by which it was first promised to start, or after a job of a higher priority had come. inf if no
    promise was given."""
    end_s: Floats  # inf: the job has not ended
    state: tuple[str, ...]  # of tessera.formulation.job.lifecycle; held: it has not arrived
    restarts: Ints  # starts after the first, moves and changes
    admitted: Bools  # its deadline was promised at some time
    nodes: tuple[str, ...]  # the names of the nodes that segments refer to
    tasks: tuple[Arrival, ...]  # the profiling tasks that were created, in order
    task_segments: tuple[Segment, ...]  # their jobs are indices into ``tasks``
    refused: int  # rounds that broke a rule and were not carried out
    ended_s: float  # when the run ended
    stuck: bool  # jobs were left that no event was going to start

    @property
    def profiling_gpu_s(self) -> float:
        """Return the GPU-seconds that profiling tasks held."""
        return float(sum(s.held_gpu_s for s in self.task_segments))


def simulate(
    scenario: Scenario,
    decide: Callable[[Snapshot], RoundOutcome],
    conditions: Conditions,
    clock: Clock,
    progress: Callable[[float, int], None] = lambda _now_s, _over: None,
    observe: Callable[[World], None] = lambda _world: None,
) -> Result:
    """Run ``scenario`` to its end. ``progress`` gets the time and the number of jobs that are over.

    ``observe`` is called after each round, and must not change the world.

    Raises:
        InvariantBroken: the world contradicts itself after a round.
    """
    world = World(
        scenario,
        overheads=conditions.overheads,
        visible=conditions.visible,
        failures=conditions.failures,
        stragglers=conditions.stragglers,
        slowdowns=conditions.slowdowns,
        ended_early=conditions.ended_early,
        measures=conditions.measures,
    )
    if isinstance(decide, Decider) and decide.options.fair_share:
        world.store.count_use(decide.options.fair_half_life_s)
    rows: list[RoundRow] = []
    refused, stuck, last_change_s, now_s = 0, False, 0.0, 0.0
    times, happened = conditions.round_times(), False
    last: _DecidedRound | None = None
    while True:
        happened |= world.advance(now_s) > 0
        if world.over() or now_s >= conditions.horizon_s:
            break
        if world.store.jobs.live:
            if happened or not conditions.on_events:
                times.ask(now_s)
            if times.due_s() <= now_s:
                times.begin(now_s)
                needed = happened or (last is not None and now_s >= last.needed_s)
                # Repeat the last round without deciding if it has shown that nothing can change.
                if needed or last is None or world.store.rounds + 1 >= last.stands_until:
                    last = _round(world, decide, clock, conditions)
                else:
                    last = _repeated(world, last)
                times.need(last.needed_s)
                times.expect(last.next_start_s)
                rows.append(last.row)
                refused += last.broken
                if happened or last.changed:
                    last_change_s = now_s
                happened = False
                observe(world)
        if world.quiet() and now_s - last_change_s > conditions.patience_s:
            stuck = True
            break
        progress(now_s, world.jobs_over())
        now_s = min(_next_round_s(world, conditions, now_s, times), conditions.horizon_s)
    world.check()
    world.close()
    return _result(world, conditions, rows, refused, stuck)


def _next_round_s(world: World, conditions: Conditions, now_s: float, times: RoundTimes) -> float:
    """Return the time after ``now_s`` at which a round may next be due.

    If there are no jobs, rounds wait for the next event. Without ``on_events`` they stay on whole
    multiples of ``round_s``, except for those that promises need.
    """
    step, event_s = conditions.round_s, world.next_event_s()
    if not math.isfinite(event_s):
        event_s = now_s + step
    following = (math.floor(now_s / step + 1e-9) + 1) * step
    if conditions.on_events:
        return times.due_s(event_s) if world.store.jobs.live else event_s
    if world.store.jobs.live:
        return min(following, times.due_s())
    return max(following, math.ceil(event_s / step - 1e-9) * step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecidedRound:
    """A round that was carried out, and when the next one is needed if nothing happens."""

    row: RoundRow
    broken: bool  # whether it broke a rule, so that nothing was carried out
    changed: bool  # whether it changed any job
    needed_s: float  # the time at which promises or reservations need a round
    next_start_s: float  # the time at which a start is planned. Such a round waits for the spacing
    stands_until: int  # number of the next round that may change something (``RoundOutcome``)


def _round(
    world: World,
    decide: Callable[[Snapshot], RoundOutcome],
    clock: Clock,
    conditions: Conditions,
) -> _DecidedRound:
    """Decide a round and carry it out."""
    snapshot = world.snapshot()
    before_s = clock.monotonic_s()
    outcome = decide(snapshot)
    decide_s = clock.monotonic_s() - before_s
    broken = bool(outcome.violations)
    if broken:
        changes = []
        world.store.pass_round()
    else:
        changes = world.carry_out(
            outcome.decisions,
            outcome.segments_after(snapshot),
            outcome.prices,
            outcome.plan,
        )
    world.check()
    problem, solution, store = outcome.problem, outcome.solution, world.store
    needed_s = due_s(snapshot, outcome, conditions.round_s)
    needed_s = min(needed_s, snapshot.reservations.next_change_s(snapshot.now_s))
    if conditions.spacing_s is not None:
        needed_s = min(needed_s, next_segment_s(snapshot, outcome))
    row = RoundRow(
        at_s=world.now_s,
        decide_s=decide_s,
        objective=solution.objective / problem.scale,
        gap=solution.gap,
        bound_is_trivial=outcome.bound_is_trivial,
        running=world.jobs_running(),
        waiting=store.live_jobs() - world.jobs_running(),
        gpus=int(store.jobs.current_gpus.sum()),
        changed=sum(c.kind in CHANGES_GPUS for c in changes),
        suspended=sum(c.kind is DecisionKind.SUSPEND for c in changes),
    )
    return _DecidedRound(
        row=row,
        broken=broken,
        changed=bool(changes),
        needed_s=needed_s - EPOCH_S,
        next_start_s=next_start_s(snapshot, outcome) - EPOCH_S,
        stands_until=outcome.stands_until,
    )


def _repeated(world: World, last: _DecidedRound) -> _DecidedRound:
    """Skip a round that would change nothing, and return a copy of ``last`` for it."""
    world.store.pass_round()
    world.check()
    return replace(last, row=replace(last.row, at_s=world.now_s, decide_s=0.0, decided=False))


def _result(
    world: World, conditions: Conditions, rows: list[RoundRow], refused: int, stuck: bool
) -> Result:
    store, jobs = world.store, world.store.users_jobs
    return Result(
        scenario=world.scenario,
        conditions=conditions,
        segments=tuple(world.segments),
        rounds=tuple(rows),
        arrival_s=np.array([one.arrival_s for one in world.scenario.arrivals]),
        first_start_s=world.first_start_s[:jobs],
        start_by_s=store.jobs.first_start_by_s[:jobs] - EPOCH_S,
        end_s=store.jobs.ended_s[:jobs],
        state=tuple(STATES[code].value for code in store.jobs.state[:jobs].tolist()),
        restarts=world.restarts[:jobs],
        admitted=store.jobs.promised[:jobs],
        nodes=store.node_names,
        tasks=tuple(world.tasks()),
        task_segments=tuple(world.task_segments),
        refused=refused,
        ended_s=world.now_s,
        stuck=stuck,
    )
