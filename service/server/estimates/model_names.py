"""The names of models in submitted jobs, compared with those that a cluster knows."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from tessera.estimator.architectures.published import published_models
from tessera.formulation.base.suggestions import MIN_SIMILARITY
from tessera.formulation.base.values import Workload
from tessera.formulation.records.jobs import JobSpec

MIN_SIZE_SIMILARITY: Final = 0.85
"""Similarity from which a size is taken for a known one. That of 1.3 and 1.3B is 0.86."""

_Name: TypeAlias = tuple[str, str]
"""A model and its size."""


class NameRemark(NamedTuple):
    """A remark on the name of a job's model. ``refused`` is whether the job may not be submitted."""

    text: str
    refused: bool


NameRemarks: TypeAlias = Mapping[tuple[Workload, bool], NameRemark]
"""Remarks by ``name_key``."""
NO_REMARKS: Final[NameRemarks] = MappingProxyType({})


def name_key(spec: JobSpec) -> tuple[Workload, bool]:
    """Return what the remark on a job's model depends on: it, and whether a GPU type is stated."""
    return spec.workload, bool(spec.requested_gpu_type)


def remark_names(
    specs: Iterable[JobSpec], list_names: Callable[[], Collection[_Name]]
) -> NameRemarks:
    """Return the remarks on jobs' models that nobody knows.

    A job that states a GPU type runs without an estimate, so its model may be unknown. Any other job
    waits until its model is known. A name similar to a known one is then taken for a mistake.
    ``list_names`` returns those that users described or that have estimates. Published models need
    no look at them.
    """
    published = published_models().keys()
    unknown = {
        name_key(spec)
        for spec in specs
        if (spec.workload.model, spec.workload.params) not in published
    }
    if not unknown:
        return NO_REMARKS
    known = {*published, *list_names()}
    remarks = {
        (workload, typed): _remark(workload, known, typed=typed)
        for workload, typed in unknown
        if (workload.model, workload.params) not in known
    }
    return {key: remark for key, remark in remarks.items() if remark is not None}


def _remark(workload: Workload, known: Collection[_Name], *, typed: bool) -> NameRemark | None:
    name = f"{workload.model} {workload.params}".rstrip()
    near = find_near_name(workload.model, workload.params, known)
    model = workload.model
    if near is None and not workload.params and not typed:  # a misspelt name may lack its size, too
        model = _nearest(model, sorted({name for name, _ in known}), MIN_SIMILARITY) or model
    sizes = ", ".join(sorted(size for known_model, size in known if known_model == model))
    if near is None and sizes and not workload.params and not typed:
        is_known = model == workload.model
        meant = "" if is_known else f" is not known; did you mean {model}? That"
        other = "" if is_known else f", or describe {name} first (`tessera models add`)"
        return NameRemark(
            f"{name}{meant} needs its size, because the job needs an estimate of it; state its params"
            f" (--params), one of {sizes}{other}",
            refused=True,
        )
    if near is None:
        if typed:
            return None
        of_sizes = f" (known sizes of {workload.model}: {sizes})" if sizes else ""
        return NameRemark(
            f"nobody has described the model {name}{of_sizes}, so the job waits until somebody does:"
            " `tessera models add`, or import a profile of it; a job that states a GPU type runs without",
            refused=False,
        )
    hint = f"did you mean {near[0]}/{near[1]} (--model {near[0]} --params {near[1]})?"
    if typed:
        return NameRemark(f"nobody has described the model {name}; {hint}", refused=False)
    return NameRemark(
        f"{name} is not known, and the job needs an estimate of it; {hint} To submit another model of this"
        " name, describe it first (`tessera models add`), or state the job's GPU type",
        refused=True,
    )


def find_near_name(model: str, params: str, known: Collection[_Name]) -> _Name | None:
    """Return the known model and size that are probably meant, or None."""
    if not params and "/" in model:  # as `tessera estimate` and `tessera models` write it
        model, _, params = model.rpartition("/")
        if (model, params) in known:
            return model, params
    sizes = defaultdict[str, list[str]](list)
    for name, known_size in sorted(known):
        sizes[name].append(known_size)
    own = model if model in sizes else _nearest(model, sizes, MIN_SIMILARITY)
    if own is None:
        return None
    size = params if params in sizes[own] else _nearest(params, sizes[own], MIN_SIZE_SIMILARITY)
    return None if size is None else (own, size)


def _nearest(word: str, words: Iterable[str], cutoff: float) -> str | None:
    """Return the word that is most similar, whatever its case, or None if none is similar enough."""
    folded = {known.casefold(): known for known in words}
    near = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else None
