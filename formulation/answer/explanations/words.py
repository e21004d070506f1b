"""The words of explanations. They are the same in the API, on the command line and in documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.answer.explanations.records import Claim, Effect
from tessera.formulation.base.moments import format_rfc3339
from tessera.formulation.base.texts import Text, fill, join
from tessera.formulation.job.reasons import ReasonCode

MAX_NAMES: Final = 3
"""The largest number of names in a sentence."""
_GIB: Final = 1 << 30


def _amount(amount: float) -> str:
    return f"{amount:.12g}"


def _from(change: Change) -> str:
    return "" if math.isnan(change.before) else f" from {_amount(change.before)}"


def _weight(change: Change, job: str) -> str:
    value = _amount(change.amount)
    return (
        f"raise the job's weight{_from(change)} to {value}: `tessera update {job} --weight {value}`"
    )


def _priority(change: Change, job: str) -> str:
    priority = _amount(change.amount)
    return f"give the job priority {priority}: `tessera update {job} --priority {priority}`"


def _deadline(change: Change, job: str) -> str:
    if math.isinf(change.amount):
        return f"remove the job's deadline: `tessera update {job} --deadline none`"
    due = format_rfc3339(change.amount)
    return f"set the job's deadline to {due}: `tessera update {job} --deadline {due}`"


def _bound(word: str, option: str) -> Callable[[Change, str], str]:
    def say(change: Change, job: str) -> str:
        gpus = _amount(change.amount)
        return (
            f"change the job's {word} GPUs{_from(change)} to {gpus}:"
            f" `tessera update {job} {option} {gpus}`"
        )

    return say


def _cell(change: Change, _job: str) -> str:
    return (
        f"add a Cell of the job on {_amount(change.amount)} x {change.subject}, e.g. at"
        f" {change.size:g} samples/s"
    )


def _new_gpus(change: Change, _job: str) -> str:
    gpus, size = int(change.amount), int(change.size)
    nodes = f"on nodes of {size}" if gpus > size else "on one node"
    return f"add {gpus} x {change.subject} {nodes}"


_OPTIONS: Final[dict[str, Callable[[Change], str]]] = {
    "max_changes": lambda c: (
        "let rounds make any number of changes: `max_changes: -1`"
        if c.amount < 0
        else f"let a round make {_amount(c.amount)} changes: `max_changes: {_amount(c.amount)}`"
    ),
    "change_spacing": lambda _: "let rounds change jobs at any time: `change_spacing: 0`",
    "promise_starts": lambda _: (
        "let the objective alone choose who starts: `promise_starts: false`"
    ),
    "keep_requests": lambda _: (
        "let rounds suspend jobs that hold their requested GPUs: `keep_requests: false`"
    ),
    "max_restart_share": lambda _: "charge nothing for restarts: `max_restart_share: 0`",
    "scheduler": lambda _: "let no published scheduler decide: `scheduler: ''`",
    "solve_limit_s": lambda _: "give the round more time: no `solve_limit`",
    "gap": lambda c: f"let the round look for a better answer: `gap: {c.amount:g}`",
}

_TEXTS: Final[dict[ChangeKind, Callable[[Change, str], Text]]] = {
    ChangeKind.WEIGHT: _weight,
    ChangeKind.PRIORITY: _priority,
    ChangeKind.DEADLINE: _deadline,
    ChangeKind.ANY_TYPE: lambda _, job: (
        f"let the job run on any GPU type: `tessera update {job} --no-pinned-gpu-type`"
    ),
    ChangeKind.ANY_NODE: lambda _, job: (
        f"let the job run on the nodes that it avoids: `tessera update {job} --avoid-node none`"
    ),
    ChangeKind.ANY_LABELS: lambda _, job: (
        f"let the job run on nodes with any labels: `tessera update {job} --node-selector none`"
    ),
    ChangeKind.ALLOW_TYPE: lambda c, job: (
        f"let the job run on {join_names(c.subject.split(','))}:"
        f" `tessera update {job} --allowed-gpu-types {c.subject}`"
    ),
    ChangeKind.MIN_GPUS: _bound("least", "--min-gpus"),
    ChangeKind.MAX_GPUS: _bound("most", "--max-gpus"),
    ChangeKind.STAY: lambda _, job: (
        f"keep the job on its GPUs while it keeps its Cell: `tessera update {job} --pinned`"
    ),
    ChangeKind.RELEASE: lambda _, job: f"release the job: `tessera release {job}`",
    ChangeKind.RETRY: lambda _, job: (
        f"try the job again at once: `tessera hold {job}`, then `tessera release {job}`"
    ),
    ChangeKind.REQUEST: lambda c, _: (
        f"submit the job again with a request of {_amount(c.amount)} instead of"
        f" {_amount(c.before)} GPUs"
    ),
    ChangeKind.REQUEST_TYPE: lambda c, _: (
        f"submit the job again with a GPU type: `--gpu-type {c.subject}`; it then runs at an"
        " unknown rate"
    ),
    ChangeKind.BEST_EFFORT: lambda _, job: "submit the job again as best effort",
    ChangeKind.ANY_PLAN: lambda _, job: "submit the job again without a stated execution plan",
    ChangeKind.QUOTA: lambda c, _: fill(
        "raise the quota of {tenant}{before} to {gpus} GPUs",
        tenant=c.named_subject,
        before=_from(c),
        gpus=int(c.amount),
    ),
    ChangeKind.BORROW: lambda c, _: fill(
        "let tenant {tenant} borrow {gpus} GPUs instead of {before}",
        tenant=c.named_subject,
        gpus=int(c.amount),
        before=int(c.before),
    ),
    ChangeKind.LEND: lambda c, _: fill(
        "let tenant {tenant} lend its quota", tenant=c.named_subject
    ),
    ChangeKind.TENANT_WEIGHT: lambda c, _: fill(
        "give tenant {tenant} a weight of {weight:.12g}", tenant=c.named_subject, weight=c.amount
    ),
    ChangeKind.UNDRAIN: lambda c, _: (
        f"undrain node {c.subject}, or start its agent: `tessera undrain {c.subject}`"
    ),
    ChangeKind.LOSE: lambda c, _: f"do without node {c.subject}: `tessera drain {c.subject}`",
    ChangeKind.ADD_GPUS: _new_gpus,
    ChangeKind.ADD_CPUS: lambda c, _: (
        f"let jobs use {_amount(c.amount)} instead of {_amount(c.before)} CPU cores of node"
        f" {c.subject} (`cpus` in the cluster file)"
    ),
    ChangeKind.ADD_HOST_MEMORY: lambda c, _: (
        f"let jobs use {c.amount / _GIB:.4g} instead of {c.before / _GIB:.4g} GiB of host memory of"
        f" node {c.subject} (`host_memory` in the cluster file)"
    ),
    ChangeKind.ADD_CELL: _cell,
    ChangeKind.POLICY: lambda c, _: _OPTIONS[c.subject](c),
    ChangeKind.END: lambda c, _: fill("wait until {job} has ended", job=c.named_subject),
    ChangeKind.WAIT: lambda c, _: f"wait until {format_rfc3339(c.amount)}",
}


def describe_changes(changes: Sequence[Change], job: str) -> Text:
    """Return what to do, e.g. ``wait until a and b have ended``."""
    names = [change.named_subject for change in changes]
    if len(changes) > 1 and changes[0].kind is ChangeKind.END:
        return fill("wait until {jobs} have ended", jobs=join_names(names, len(names)))
    if len(changes) > 1 and changes[0].kind is ChangeKind.UNDRAIN:
        return fill(
            "undrain nodes {nodes}, or start their agents: `tessera undrain {arguments}`",
            nodes=join_names(names, len(names)),
            arguments=join(" ", names),
        )
    return join("; ", [_TEXTS[change.kind](change, job) for change in changes])


def describe_step(
    changes: Sequence[Change],
    job: str,
    claim: Claim,
    cell: str,
    then: ReasonCode | None,
    effects: Sequence[Effect],
) -> Text:
    """Return a step in words, with what a round then decides. ``cell`` is the job's Cell then."""
    if claim is Claim.OTHER_REASON:
        shown = f"the job would then wait for another reason, {then}"
    elif claim is Claim.STAYS:
        shown = "the job would then stay as it was"
    else:
        shown = f"the job would then run on {cell}"
    does = join("; ", (describe_changes(changes, job), shown))
    return join(", and ", (does, *_losses(effects)))


def _losses(effects: Sequence[Effect]) -> Iterator[Text]:
    """Yield what other jobs would lose."""
    stops = [effect.job for effect in effects if not effect.cell]
    slower = [effect.job for effect in effects if effect.cell]
    cells = [effect.cell for effect in effects if effect.cell]
    if stops:
        yield fill("{jobs} would wait", jobs=join_names(stops))
    if slower:
        cell = f", on {cells[0]}" if len(cells) == 1 else ""
        yield fill("{jobs} would run more slowly{cell}", jobs=join_names(slower), cell=cell)


def join_names(names: Sequence[Text], most: int = MAX_NAMES) -> Text:
    """Return names as in a sentence, e.g. ``a, b and 2 more``."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    final_name = shown.pop()
    return join(" and ", (join(", ", shown), final_name)) if shown else final_name
