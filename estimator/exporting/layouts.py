"""Rules of views, copies and look-ups, which need no arithmetic."""

from __future__ import annotations

from typing import Any, Final

from tessera.estimator.exporting.lowering import ProgramBuilder, Rule
from tessera.estimator.exporting.nodes import Node, values_in, values_read


def _first(node: Node) -> int:
    return values_read(node)[0]


def _axes(given: Any, rank: int) -> tuple[int, ...]:
    """Return axes counted from the front. A single number is one axis."""
    many = given if isinstance(given, list | tuple) else [given]
    return tuple(int(a) % max(rank, 1) for a in many)


def same_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate another name for the same value."""
    low.view("copy", _first(node), node.writes[0])


def detach_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a value through which no gradient flows."""
    same_rule(low, node)
    low.trained.discard(node.writes[0])


def reshape_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a reshape of the same elements."""
    low.view("reshape", _first(node), node.writes[0])


def permute_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a permutation of axes, as a view."""
    source = _first(node)
    rank = len(low.shape(source))
    if "dims" in node.arguments:
        order = _axes(node.arguments["dims"], rank)
    else:  # two axes are exchanged; those of a matrix by default
        pair = _axes([node.arguments.get("dim0", 0), node.arguments.get("dim1", -1)], rank)
        order = tuple({pair[0]: pair[1], pair[1]: pair[0]}.get(d, d) for d in range(rank))
    low.view("permuted", source, node.writes[0], permutation=order)


def expand_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate the repetition of new axes, or axes of size one, without a copy."""
    low.view("expanded", _first(node), node.writes[0])


def unsqueeze_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate the insertion of an axis."""
    write = node.writes[0]
    places = _axes(node.arguments["dim"], len(low.shape(write)))
    low.view("expand_dims", _first(node), write, dimensions=places)


def squeeze_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate the removal of axes of size one: all, or those that are named."""
    source = _first(node)
    shape = low.shape(source)
    named = node.arguments.get("dim")
    axes = range(len(shape)) if named is None else _axes(named, len(shape))
    gone = tuple(a for a in axes if shape[a] == 1)
    low.view("squeeze", source, node.writes[0], dimensions=gone)


def select_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate the selection of one place of an axis, or of every place separately."""
    source = _first(node)
    gone = _axes(node.arguments["dim"], len(low.shape(source)))
    for write in node.writes:
        low.view("squeeze", source, write, dimensions=gone)


def slice_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate slices of an axis."""
    for write in node.writes:
        low.view("part", _first(node), write)


def copy_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a copy into another layout.

    Nothing is copied if the layout is the same, or if attention wrote the value, which then already
    has this layout.
    """
    source, copied = low.origin(_first(node))
    alike = node.arguments.get("memory_format") in (None, "preserve_format")
    name = "copy" if alike or (source in low.attended and not copied) else "clone"
    low.view(name, _first(node), node.writes[0])


def cast_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a copy in another data type."""
    source, write = _first(node), node.writes[0]
    if low.program.values[source].dtype == low.program.values[write].dtype:
        low.view("copy", source, write)
    else:
        low.emit("convert_element_type", (source,), write)


def concatenate_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate the concatenation of tensors along an axis."""
    parts = [v for v in values_read(node) if low.shape(v) != (0,)]
    rank = len(low.shape(node.writes[0]))
    (axis,) = _axes(node.arguments.get("dim", 0), rank)
    low.emit("concatenate", parts, node.writes[0], dimension=axis)


def move_rule(name: str) -> Rule:
    """Return the rule of data movement by an operator of that name."""

    def rule(low: ProgramBuilder, node: Node) -> None:
        low.emit(name, values_read(node), node.writes[0])

    return rule


def look_up_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a look-up of elements by indices, which the backward pass needs."""
    source, *indices = values_read(node)
    table = source in low.program.parameters
    name = "clone" if not indices else "gather" if table else "pick"
    low.emit(name, (source, *indices), node.writes[0])
    if source in low.trained:
        low.save(*indices)


def scatter_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate writes of elements to places given by indices."""
    low.emit("scatter-add", values_read(node), node.writes[0])
    low.save(*(v for v in values_read(node) if not low.floating(v)))


def constant_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a constant. Of a tensor that serves as a pattern, only the shape is used."""
    low.emit("iota", (), node.writes[0])


def random_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate random numbers."""
    low.emit("random_bits", tuple(values_in(node.arguments.get("self"))), node.writes[0])


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(("alias", "lift_fresh_copy", "view_as_real", "contiguous"), same_rule),
    **dict.fromkeys(("detach", "detach_copy"), detach_rule),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "flatten", "unflatten"), reshape_rule),
    **dict.fromkeys(("permute", "transpose", "t"), permute_rule),
    "expand": expand_rule,
    "unsqueeze": unsqueeze_rule,
    "squeeze": squeeze_rule,
    **dict.fromkeys(("select", "unbind"), select_rule),
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes", "chunk"), slice_rule),
    "clone": copy_rule,
    "copy": cast_rule,
    "_to_copy": cast_rule,
    "cat": concatenate_rule,
    "constant_pad_nd": move_rule("pad"),
    "repeat": move_rule("tile"),
    **dict.fromkeys(("flip", "roll"), move_rule("rev")),
    **dict.fromkeys(("slice_scatter", "select_scatter"), move_rule("dynamic_update_slice")),
    **dict.fromkeys(("index", "gather", "index_select", "take"), look_up_rule),
    **dict.fromkeys(
        ("index_put", "index_add", "scatter", "scatter_add", "scatter_reduce", "_unsafe_index_put"),
        scatter_rule,
    ),
    **dict.fromkeys(
        (
            "arange",
            "full",
            "full_like",
            "zeros",
            "zeros_like",
            "ones",
            "ones_like",
            "empty",
            "empty_like",
            "scalar_tensor",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
            "eye",
            "linspace",
            "tril_indices",
        ),
        constant_rule,
    ),
    **dict.fromkeys(
        ("rand", "randn", "randint", "randperm", "bernoulli", "rand_like", "randn_like"),
        random_rule,
    ),
}
