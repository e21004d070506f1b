"""Export of a PyTorch module without allocation, and the reader of the export.

This is the only module that needs PyTorch. Everything is on the meta device, so that a model of any
size consists of shapes only.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import graph_signature as signatures

from tessera.estimator.exporting.nodes import ExportedProgram, Node, ValueRef
from tessera.estimator.graph import Untraceable
from tessera.estimator.programs.program import Value

KEPT_OPERATORS = (
    "linear.default",
    "matmul.default",
    "scaled_dot_product_attention.default",
    "layer_norm.default",
    "rms_norm.default",
    "silu.default",
)
"""Operators that are kept. All others that PyTorch can decompose become its core operators."""

INLINED_CALLS = ("wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint")
"""Operators that only call a graph."""

ModuleCall = tuple[Any, tuple[Any, ...], dict[str, Any]]


def make_module(target: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> ModuleCall:
    """Return the module, example arguments and keyword arguments that a user's function makes.

    It is called with the meta device as default. If that fails, it is called without it.

    Raises:
        Untraceable: the function fails, or returns something else.
    """
    result = _call_function(target, make, arguments)
    parts = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(parts) not in (2, 3) or not isinstance(parts[0], torch.nn.Module):
        raise Untraceable(
            f"{target} returned {_kinds(parts)}; it must return (module, args) or (module, args, kwargs),"
            " where module is a torch.nn.Module and args a tuple of what its forward takes"
        )
    module, args, *rest = parts
    args = args if isinstance(args, tuple | list) else (args,)
    kwargs = rest[0] if rest else {}
    if not isinstance(kwargs, dict):
        raise Untraceable(f"{target} returned {_kinds(parts)}; kwargs must be a dictionary")
    _to_meta(module)
    return module, tuple(_meta(a) for a in args), {k: _meta(v) for k, v in kwargs.items()}


def _call_function(target: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the program's output
            try:
                with torch.device("meta"):
                    return make(**arguments)
            except (NotImplementedError, RuntimeError) as error:
                if "meta" not in str(error).lower():
                    raise
                return make(**arguments)
    except Exception as error:  # a user's function may raise anything
        raise Untraceable(
            f"{target} fails: {type(error).__name__}: {error}; make it work when it is called alone"
        ) from error


def leading_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int | None]:
    """Return the sizes of the first axes of all tensors among the arguments.

    The size is None for a tensor without axes.
    """
    sizes: set[int | None] = set()
    todo = [*args, *kwargs.values()]
    while todo:
        what = todo.pop()
        if isinstance(what, torch.Tensor):
            sizes.add(int(what.shape[0]) if what.ndim else None)
        elif isinstance(what, list | tuple):
            todo.extend(what)
        elif isinstance(what, dict):
            todo.extend(what.values())
    return sizes


def export_module(target: str, given: ModuleCall) -> ExportedProgram:
    """Return a module's forward pass by ``torch.export``, in ATen operators, none in place.

    Raises:
        Untraceable: the module cannot be exported; the message says why and what to do.
    """
    module, args, kwargs = given
    try:
        with _silence_torch():
            program = torch.export.export(module, args, kwargs, strict=False)
            program = program.run_decompositions(_table())
    except Exception as error:  # a module's forward may raise anything
        raise _refusal(target, error) from error
    return _Reader(target=target).read(program)


def _table() -> Any:
    """Return the table of decompositions of operators."""
    table: Any = torch.export.default_decompositions()
    for name in KEPT_OPERATORS:
        packet, _, overload = name.partition(".")
        if (operator := getattr(torch.ops.aten, packet, None)) is not None:
            table.pop(getattr(operator, overload), None)
    return table


@contextlib.contextmanager
def _silence_torch() -> Iterator[None]:
    """Suppress the logs, prints and warnings of PyTorch: whole graphs, and remarks on its own code."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        discarded = io.StringIO()
        with (
            contextlib.redirect_stdout(discarded),
            contextlib.redirect_stderr(discarded),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _refusal(target: str, error: Exception) -> Untraceable:
    """Return PyTorch's error as one sentence that says what to do."""
    text, kind = str(error), type(error).__name__
    first = text.strip().partition("\n")[0].rstrip(".")
    if "data-dependent" in text.lower() or "DataDependent" in kind or "DynamicOutputShape" in kind:
        return Untraceable(
            f"{target}: Python needs the value of a tensor that is only known when the module runs ({first});"
            " branch with torch.where, and select with a mask, not with an index whose length depends on data"
        )
    return Untraceable(
        f"{target} fails while it is exported: {kind}: {first}; make torch.export.export(module, args) work"
        " first, with the module and args on the meta device"
    )


def _kinds(parts: Sequence[Any]) -> str:
    return "(" + ", ".join(type(p).__name__ for p in parts) + ")"


def _meta(what: Any) -> Any:
    if isinstance(what, torch.Tensor):
        return what.to("meta")
    if isinstance(what, list | tuple):
        return type(what)(_meta(part) for part in what)
    if isinstance(what, dict):
        return {k: _meta(v) for k, v in what.items()}
    return what


def _to_meta(module: Any) -> None:
    """Move tensors from other devices to the meta device.

    Shared parameters remain shared. ``Module.to`` would separate them.
    """
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and parameter.device.type != "meta":
                if id(parameter) not in moved:
                    moved[id(parameter)] = (
                        parameter,
                        torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad),
                    )
                part._parameters[name] = moved[id(parameter)][1]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.device.type != "meta":
                part._buffers[name] = buffer.to("meta")


@dataclass(slots=True)
class _Reader:
    """The nodes and values read so far."""

    target: str
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def read(self, program: Any) -> ExportedProgram:
        signature = program.graph_signature
        known: dict[Any, Any] = {}
        parameters, inputs = [], []
        kinds = {spec.arg.name: spec.kind for spec in signature.input_specs}
        for node in program.graph.nodes:
            if node.op != "placeholder":
                continue
            what = node.meta["val"]
            if not isinstance(what, torch.Tensor):
                known[node] = what
                continue
            number = self._value(what, "an argument")
            known[node] = ValueRef(number)
            if kinds[node.name] is signatures.InputKind.PARAMETER:
                parameters.append(number)
            elif kinds[node.name] is signatures.InputKind.USER_INPUT:
                inputs.append(number)
        returned = self._walk(program.graph_module, known, "")
        wanted = [
            ref.value
            for spec, ref in zip(signature.output_specs, returned, strict=True)
            if spec.kind is signatures.OutputKind.USER_OUTPUT and isinstance(ref, ValueRef)
        ]
        return ExportedProgram(
            values=tuple(self.values),
            nodes=tuple(self.nodes),
            parameters=tuple(parameters),
            inputs=tuple(inputs),
            results=tuple(wanted),
        )

    def _walk(self, graph: Any, known: dict[Any, Any], inside: str) -> Sequence[Any]:
        """Read the nodes of a graph whose placeholders are known, and return its results."""
        for node in graph.graph.nodes:
            path = _path(node) or inside
            if node.op == "get_attr":
                what = operator.attrgetter(node.target)(graph)
                known[node] = (
                    ValueRef(self._value(what, path)) if isinstance(what, torch.Tensor) else what
                )
            elif node.op == "output":
                returned: Sequence[Any] = _replaced(node.args[0], known)
                return returned
            elif node.op == "call_function":
                known[node] = self._call(node, known, path)
        return ()

    def _call(self, node: Any, known: dict[Any, Any], path: str) -> Any:
        args, kwargs = _replaced(node.args, known), _replaced(node.kwargs, known)
        if node.target is operator.getitem:
            return args[0][args[1]]
        name = getattr(node.target, "__name__", str(node.target))
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._inlined(name, args, path)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Untraceable(
                f"{self.target}: {path or 'the module'} computes {name} of a size that is only known when it"
                " runs; give the example arguments fixed sizes, and select with a mask"
            )
        schema = node.target._schema
        bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        bound |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        result = node.meta.get("val")
        many = isinstance(result, list | tuple)
        written = [
            self._value(r, path) if isinstance(r, torch.Tensor) else -1
            for r in (result if many else [result])
        ]
        space, _, plain = schema.name.rpartition("::")
        self.nodes.append(
            Node(
                target=plain if space == "aten" else schema.name,
                arguments={a.name: bound[a.name] for a in schema.arguments if a.name in bound},
                writes=tuple(written),
                pointwise=torch.Tag.pointwise in node.target.tags,
                path=path,
            )
        )
        given = [ValueRef(v) if v >= 0 else None for v in written]
        return given if many else given[0]

    def _inlined(self, name: str, args: Sequence[Any], path: str) -> Any:
        places = [i for i, a in enumerate(args) if isinstance(a, torch.fx.GraphModule)]
        if name not in INLINED_CALLS or len(places) != 1:
            raise Untraceable(
                f"{self.target}: {path or 'the module'} calls {name}, whose work depends on data; branch with"
                " torch.where, and loop a number of times that Python knows"
            )
        graph = args[places[0]]
        starts = [n for n in graph.graph.nodes if n.op == "placeholder"]
        known = dict(zip(starts, args[places[0] + 1 :], strict=True))
        return self._walk(graph, known, path)

    def _value(self, what: Any, path: str) -> int:
        if any(not isinstance(size, int) for size in what.shape):
            raise Untraceable(
                f"{self.target}: a tensor of {path or 'the module'} has the dynamic shape"
                f" {tuple(what.shape)}; give the example arguments fixed sizes, and select with a mask"
            )
        floating = what.dtype.is_floating_point or what.dtype.is_complex
        shape, dtype = tuple(what.shape), str(what.dtype).removeprefix("torch.")
        self.values.append(Value(shape, dtype, what.dtype.itemsize, floating))
        return len(self.values) - 1


def _replaced(what: Any, known: Mapping[Any, Any]) -> Any:
    """Return arguments with nodes replaced by their known values."""
    if isinstance(what, torch.fx.Node):
        return known[what]
    if isinstance(what, list | tuple):
        return [_replaced(part, known) for part in what]
    if isinstance(what, dict):
        return {k: _replaced(v, known) for k, v in what.items()}
    if isinstance(what, torch.memory_format | torch.dtype):
        return str(what).removeprefix("torch.")
    return what


def _path(node: Any) -> str:
    """Return the path of the module of a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""
