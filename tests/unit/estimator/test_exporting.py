"""Graphs of exported PyTorch programs. The nodes are listed here, so PyTorch is not needed."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner

from tessera.estimator.exporting.graphs import export_graph, graph_of_difference, graph_of_samples
from tessera.estimator.exporting.nodes import ExportedProgram, Node, ValueRef
from tessera.estimator.exporting.translate import program_of
from tessera.estimator.graph import Graph, Untraceable
from tessera.estimator.programs.program import Operator, Program, Value
from tessera.formulation.base.errors import Unavailable
from tessera.service.cli import main

_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}


@dataclass
class Sketch:
    """An exported module, listed call by call."""

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    path: str = ""

    def value(self, *shape: int, dtype: str = "float32") -> ValueRef:
        floating = dtype in ("float32", "bfloat16")
        self.values.append(Value(shape, dtype, _BYTES[dtype], floating))
        return ValueRef(len(self.values) - 1)

    def weight(self, *shape: int) -> ValueRef:
        ref = self.value(*shape)
        self.parameters.append(ref.value)
        return ref

    def input(self, *shape: int, dtype: str = "float32") -> ValueRef:
        ref = self.value(*shape, dtype=dtype)
        self.inputs.append(ref.value)
        return ref

    def call(
        self, target: str, /, *shape: int, dtype: str = "float32", **arguments: Any
    ) -> ValueRef:
        out = self.value(*shape, dtype=dtype)
        self.nodes.append(
            Node(target=target, arguments=arguments, writes=(out.value,), path=self.path)
        )
        return out

    def linear(self, x: ValueRef, width: int) -> ValueRef:
        shape = self.values[x.value].shape
        weight, bias = self.weight(width, shape[-1]), self.weight(width)
        return self.call("linear", *shape[:-1], width, input=x, weight=weight, bias=bias)

    def exported(self, *results: ValueRef) -> ExportedProgram:
        return ExportedProgram(
            values=tuple(self.values),
            nodes=tuple(self.nodes),
            parameters=tuple(self.parameters),
            inputs=tuple(self.inputs),
            results=tuple(r.value for r in results),
        )

    def program(self, *results: ValueRef) -> Program:
        return program_of("sketch", self.exported(*results), self.inputs)

    def operators(self, *results: ValueRef) -> dict[str, Operator]:
        return {op.name: op for op in self.program(*results).operators}

    def saved(self, *results: ValueRef) -> set[int]:
        return set(self.program(*results).residuals)


def a_perceptron(samples: int, layers: int = 2, constant: int = 0) -> ExportedProgram:
    """Return a program of linear layers; ``constant`` elements do not depend on the batch size."""
    sketch = Sketch()
    x = sketch.input(samples, 8)
    for n in range(layers):
        sketch.path = f"body.{n}"
        x = sketch.call("relu", samples, 8, self=sketch.linear(x, 8))
    if constant:
        total = sketch.call("sum", self=x)
        table = sketch.call("expand", constant, self=total)
        more = sketch.call("exp", constant, self=table)
        return sketch.exported(sketch.call("mean", self=sketch.call("add", self=more, other=total)))
    return sketch.exported(sketch.call("mean", self=x))


def a_block(samples: int, heads: int, *, packed: bool) -> ExportedProgram:
    """Return a program with attention between two products, and a residual around it.

    Heads are split as by hand-written code or, if ``packed``, as by ``nn.MultiheadAttention``.
    """
    length, hidden = 16, 32
    width, s = hidden // heads, Sketch()
    x = s.input(samples, length, hidden)
    into = s.linear(x, hidden)
    y = s.linear(into, 3 * hidden)
    if packed:
        cut = s.call("view", samples, length, 3, hidden, self=y, size=())
        first = s.call("permute", 3, samples, length, hidden, self=cut, dims=[2, 0, 1, 3])
        whole = s.call(
            "clone", 3, samples, length, hidden, self=first, memory_format="contiguous_format"
        )
        rows = [
            s.call("select", samples, length, hidden, self=whole, dim=0, index=n) for n in range(3)
        ]
        merged = [s.call("view", samples * length, heads, width, self=r, size=()) for r in rows]
        split = [s.call("view", samples, length, heads, width, self=m, size=()) for m in merged]
    else:
        rows = [s.call("slice", samples, length, hidden, self=y, dim=2) for _ in range(3)]
        split = [s.call("view", samples, length, heads, width, self=r, size=()) for r in rows]
    q, k, v = (
        s.call("permute", samples, heads, length, width, self=p, dims=[0, 2, 1, 3]) for p in split
    )
    z = s.call(
        "scaled_dot_product_attention",
        samples,
        heads,
        length,
        width,
        query=q,
        key=k,
        value=v,
        is_causal=True,
    )
    back = s.call("permute", samples, length, heads, width, self=z, dims=[0, 2, 1, 3])
    copy = s.call(
        "clone", samples, length, heads, width, self=back, memory_format="contiguous_format"
    )
    joined = s.call("view", samples, length, hidden, self=copy, size=())
    added = s.call("add", samples, length, hidden, self=into, other=s.linear(joined, hidden))
    return s.exported(s.linear(added, 1))


def graph_of(exported: ExportedProgram) -> Graph:
    return graph_of_samples("sketch", exported, {exported.values[exported.inputs[0]].shape[0]})


@pytest.mark.parametrize(
    ("target", "left", "right", "out"),
    [
        ("matmul", (2, 3, 4, 5), (2, 3, 5, 6), (2, 3, 4, 6)),
        ("matmul", (2, 4, 5), (5, 6), (2, 4, 6)),
        ("matmul", (4, 5), (5,), (4,)),
        ("bmm", (7, 4, 5), (7, 5, 6), (7, 4, 6)),
        ("mm", (4, 5), (5, 6), (4, 6)),
        ("addmm", (4, 5), (5, 6), (4, 6)),
    ],
)
def test_products_count_two_flops_per_multiply_add(
    target: str, left: Sequence[int], right: Sequence[int], out: Sequence[int]
) -> None:
    names = (
        ("mat1", "mat2")
        if target == "addmm"
        else ("self", "other" if target == "matmul" else "mat2")
    )
    s = Sketch()
    arguments: dict[str, Any] = dict(zip(names, (s.input(*left), s.weight(*right)), strict=True))
    if target == "addmm":
        arguments["self"] = s.weight(6)
    y = s.call(target, *out, **arguments)
    assert s.operators(y)["dot_general"].flops == 2 * math.prod(out) * 5


@pytest.mark.parametrize(
    ("transposed", "groups", "kernel", "out", "multiply_adds"),
    [
        (False, 1, (8, 4, 3, 3), (2, 8, 5, 5), 2 * 8 * 25 * 4 * 9),
        (False, 4, (8, 1, 3, 3), (2, 8, 5, 5), 2 * 8 * 25 * 9),
        (True, 1, (4, 8, 2, 2), (2, 8, 10, 10), 2 * 25 * 4 * 8 * 4),
        (True, 2, (4, 4, 2, 2), (2, 8, 10, 10), 2 * 25 * 4 * 4 * 4),
    ],
)
def test_convolutions_count_each_tap_once(
    *,
    transposed: bool,
    groups: int,
    kernel: tuple[int, ...],
    out: tuple[int, ...],
    multiply_adds: int,
) -> None:
    s = Sketch()
    y = s.call(
        "convolution",
        *out,
        input=s.input(2, 4, 5, 5),
        weight=s.weight(*kernel),
        bias=None,
        stride=[2, 2] if transposed else [1, 1],
        transposed=transposed,
        groups=groups,
    )
    assert s.operators(y)["conv_general_dilated"].flops == 2 * multiply_adds


def test_causal_attention_is_computed_by_half_and_stores_no_scores() -> None:
    s = Sketch()
    flops = []
    for causal in (False, True):
        q = s.linear(s.input(2, 4, 16, 8), 8)
        y = s.call(
            "scaled_dot_product_attention", 2, 4, 16, 8, query=q, key=q, value=q, is_causal=causal
        )
        flops.append(s.operators(y)["attention"].flops)
        assert s.saved(y) >= {q.value, y.value}
    assert flops == [2 * 2 * 2 * 4 * 16 * 16 * 8, 2 * 2 * 4 * 16 * 16 * 8]
    assert max(math.prod(v.shape) for v in s.program(y).values) == 2 * 4 * 16 * 8


@pytest.mark.parametrize("packed", [False, True])
def test_heads_are_followed_however_they_are_laid_out(*, packed: bool) -> None:
    graph = graph_of(a_block(2, 4, packed=packed))
    assert len(graph) == 3
    assert graph.reduced[1] == 16 * 32  # one reduction, after the product that joins the heads
    assert graph.tensor_limit[1] == 4


def test_attention_reads_packed_heads_through_a_copy_and_others_directly() -> None:
    names = [
        {op.name for op in program_of("sketch", a_block(2, 4, packed=packed), [0]).operators}
        for packed in (False, True)
    ]
    assert "headed" in names[0]
    assert "headed_clone" in names[1]


def test_a_relu_keeps_its_result_and_a_gelu_its_input() -> None:
    s = Sketch()
    x = s.linear(s.input(2, 8), 8)
    relu, gelu = s.call("relu", 2, 8, self=x), s.call("gelu", 2, 8, self=x)
    y = s.call("add", 2, 8, self=relu, other=gelu)
    assert s.saved(y) - set(s.inputs) - set(s.parameters) == {relu.value, x.value}


def test_a_factor_is_kept_only_if_the_other_one_needs_a_gradient() -> None:
    s = Sketch()
    constant = s.value(2, 8)
    x = s.linear(s.input(2, 8), 8)
    scaled = s.call("mul", 2, 8, self=constant, other=x)
    squared = s.call("mul", 2, 8, self=scaled, other=scaled)
    assert x.value not in s.saved(squared)
    assert {constant.value, scaled.value} <= s.saved(squared)


def test_dropout_keeps_a_mask_in_training_and_does_nothing_otherwise() -> None:
    for training, masks in ((True, 1), (False, 0)):
        s = Sketch()
        x = s.linear(s.input(2, 8), 8)
        out, mask = s.value(2, 8), s.value(2, 8, dtype="bool")
        s.nodes.append(
            Node(
                target="native_dropout",
                arguments={"input": x, "p": 0.1, "train": training},
                writes=(out.value, mask.value),
            )
        )
        assert len(s.saved(out) & {mask.value}) == masks


def test_batch_normalisation_computes_statistics_and_one_pass_and_keeps_its_input() -> None:
    s = Sketch()
    x = s.linear(s.input(2, 8, 4, 4), 4)
    y = s.call(
        "_native_batch_norm_legit_functional",
        2,
        8,
        4,
        4,
        input=x,
        weight=s.weight(8),
        bias=s.weight(8),
        running_mean=s.value(8),
        running_var=s.value(8),
        training=True,
    )
    operators = s.operators(y)
    assert operators["reduce_moments"].params["axes"] == (0, 2, 3)
    assert "batch_norm" in operators
    assert x.value in s.saved(y)


def test_a_reduction_with_kept_axes_is_tracked_with_them() -> None:
    s = Sketch()
    y = s.call("mean", 2, 1, self=s.linear(s.input(2, 8), 8), dim=[-1], keepdim=True)
    reduced = next(op for op in s.program(y).operators if op.name == "reduce_sum")
    assert reduced.params["axes"] == (1,)
    assert s.operators(y)["reshape"].writes == (y.value,)


def test_using_only_a_shape_is_no_dependence_on_the_batch() -> None:
    s = Sketch()
    x = s.input(2, 8)
    zeros = s.call("zeros_like", 2, 8, self=x)
    y = s.call("mul", 2, 8, self=s.linear(x, 8), other=s.call("exp", 2, 8, self=zeros))
    assert graph_of(s.exported(y)).flops.sum() == graph_of(s.exported(y)).flops[0] == 2 * 64 + 2 * 8


@pytest.mark.parametrize(
    "target", ["xformers::memory_efficient_attention", "linalg_qr", "_fft_r2c"]
)
def test_an_operator_of_unknown_cost_is_refused_by_name_and_location(target: str) -> None:
    s = Sketch(path="blocks.3.attention")
    y = s.call(target, 2, 8, self=s.linear(s.input(2, 8), 8))
    with pytest.raises(Untraceable, match=f"blocks.3.attention calls {target}.*cannot be counted"):
        s.program(y)


def test_an_operator_without_a_rule_counts_one_operation_per_result() -> None:
    s = Sketch()
    y = s.call("celu", 2, 8, self=s.linear(s.input(2, 8), 8))
    assert s.operators(y)["celu"].flops == 2 * 8


def test_several_results_are_summed_and_a_missing_loss_is_refused() -> None:
    s = Sketch()
    x = s.linear(s.input(2, 8), 8)
    program = s.program(x, s.call("exp", 2, 8, self=x))
    assert [op.name for op in program.operators][-3:] == ["reduce_sum", "reduce_sum", "add"]
    with pytest.raises(Untraceable, match="return the loss"):
        s.program(s.call("argmax", 2, dtype="int64", self=x, dim=-1))


def test_a_module_without_parameters_is_refused() -> None:
    s = Sketch()
    with pytest.raises(Untraceable, match="nothing to train"):
        s.program(s.call("exp", 2, 8, self=s.input(2, 8)))


def test_a_loss_that_does_not_read_the_batch_is_refused() -> None:
    s = Sketch()
    s.input(2, 8)
    with pytest.raises(Untraceable, match="does not depend on the batch"):
        graph_of(s.exported(s.call("sum", self=s.weight(8))))


def test_blocks_of_a_list_are_of_one_kind_named_after_their_module() -> None:
    graph = graph_of(a_perceptron(4, layers=4))
    assert len(graph) == 4
    assert len(set(graph.kind[1:3])) == 1
    assert all(kind.startswith("body-") for kind in graph.kind[:3])


def test_the_amounts_of_a_sample_are_the_difference_between_two_batch_sizes() -> None:
    plain = graph_of_difference("p", a_perceptron(2), a_perceptron(4), (2, 4))
    assert plain.flops.sum() == pytest.approx(2 * (2 * 64 + 8) + 8)
    assert plain.parameters == 2 * 72
    extra = graph_of_difference(
        "p", a_perceptron(2, constant=99), a_perceptron(4, constant=99), (2, 4)
    )
    assert extra.flops.sum() == pytest.approx(plain.flops.sum())
    whole = graph_of(a_perceptron(2, constant=99))
    assert whole.flops.sum() > extra.flops.sum() + 99 / 2


def test_dividing_by_samples_and_taking_differences_give_the_same_amounts() -> None:
    divided, differed = (
        graph_of(a_perceptron(4)),
        graph_of_difference("p", a_perceptron(2), a_perceptron(4), (2, 4)),
    )
    for name in ("flops", "touched", "kept", "boundary", "working"):
        assert getattr(differed, name)[:-1] == pytest.approx(getattr(divided, name)[:-1])


def test_an_input_that_does_not_grow_is_not_a_batch() -> None:
    def a_masked(samples: int, rows: int) -> ExportedProgram:
        s = Sketch()
        x, given = s.input(samples, 8), s.input(rows, 8)
        mask = s.call("exp", rows, 8, self=given)
        for _ in range(3):
            x = s.call("mul", samples, 8, self=s.linear(x, 8), other=mask)
        return s.exported(s.call("mean", self=x))

    fixed = graph_of_difference("m", a_masked(2, 1), a_masked(4, 1), (2, 4))
    assert len(fixed) == 3  # all three use the mask: it is live but not an activation
    assert len(graph_of_difference("m", a_masked(2, 2), a_masked(4, 4), (2, 4))) == 1


def test_an_activation_belongs_to_the_layer_it_ends() -> None:
    graph = graph_of(a_perceptron(4, layers=3))
    assert list(graph.flops[:2]) == [2 * 64 + 8] * 2
    assert (graph.kept[:2] == 0).all()  # a relu keeps only its result, the boundary


def test_a_gather_reads_only_the_selected_elements() -> None:
    s = Sketch()
    wide = s.linear(s.input(2, 8), 1000)
    index = s.input(2, 1, dtype="int64")
    graph = graph_of(s.exported(s.call("gather", 2, 1, self=wide, dim=1, index=index)))
    product, picking, summing = 8 + 1000, 2 + 1 + 1, 1 + 0.5  # an index has eight bytes
    assert graph.touched.sum() == product + picking + summing


def test_heads_written_by_attention_are_joined_without_a_copy() -> None:
    program = program_of("sketch", a_block(2, 4, packed=False), [0])
    assert "clone" not in {op.name for op in program.operators}


def test_incomparable_exports_are_refused() -> None:
    with pytest.raises(Untraceable, match="no argument grows"):
        graph_of_difference("p", a_perceptron(2), a_perceptron(2), (2, 4))
    with pytest.raises(Untraceable, match="2 layers with 2 samples and 3 with 4"):
        graph_of_difference("p", a_perceptron(2), a_perceptron(4, layers=3), (2, 4))


@pytest.mark.parametrize("leading", [{2, 3}, {None}, {2, None}, set()])
def test_inputs_without_a_leading_sample_axis_are_refused(leading: set[int | None]) -> None:
    with pytest.raises(Untraceable, match="must take `samples`"):
        graph_of_samples("p", a_perceptron(2), leading)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--torch", "a:b", "--step", "c:d"], "--step, --torch: describe different models"),
        (
            ["--torch", "a:b"],
            "this needs torch; install it with: pip install 'tessera-scheduler[torch]'",
        ),
    ],
)
def test_the_command_refuses_what_it_cannot_export(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "torch" else find_spec(n)
    )
    options = ["--batch", "8", "--gpu", "a100", "--count", "1"]
    result = CliRunner().invoke(main.app, ["estimate", *arguments, *options])
    assert result.exit_code != 0
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_without_pytorch_exporting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"tessera-scheduler\[torch\]"):
        export_graph("some.module:function")
