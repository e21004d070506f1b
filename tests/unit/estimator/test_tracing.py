"""Steps traced and compiled by JAX: FLOPs, parameters, collectives, and refused programs."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tessera.estimator import tracing
from tessera.estimator.architectures.moe import MixtureOfExperts, mixture_graph
from tessera.estimator.architectures.published import find_published
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.graph import Graph, Untraceable, layer_of
from tessera.estimator.plans import Training
from tessera.estimator.tracing.models import steps
from tessera.estimator.tracing.models.parts import softmax
from tessera.estimator.tracing.step import Step, load_step
from tessera.estimator.tracing.trace import graph_of_step
from tessera.estimator.traffic import stage_traffic
from tessera.formulation.base.errors import Unavailable
from tessera.formulation.job.execution_plan import PlanStage

F32 = jnp.float32
QUICKLY: dict[str, bool | str] = {
    "xla_llvm_disable_expensive_passes": True,
    "xla_backend_optimization_level": "0",
}
"""Options of XLA for a program that runs only once."""


def a_decoder(**changed: Any) -> Step:
    sizes = {"hidden": 64, "layers": 3, "heads": 4, "vocabulary": 512, "sequence": 32, "samples": 2}
    return steps.decoder(**(sizes | changed))


def a_step(
    loss: Callable[[Any, Any], Any], weight: tuple[int, ...] = (8, 8), batch: Any = None
) -> Step:
    batch = jax.ShapeDtypeStruct((4, 8), F32) if batch is None else batch
    return Step(name="own", loss=loss, params=jax.ShapeDtypeStruct(weight, F32), batch=batch)


def own_step() -> tuple[Any, Any, Any]:
    step = a_step(lambda w, x: jnp.mean((x @ w) ** 2))
    return step.loss, step.params, step.batch


def no_step() -> int:
    return 3


def repeated_kinds(graph: Graph, *, most: int = 4) -> Counter[str]:
    return Counter({k: n for k, n in Counter(graph.kind).items() if n >= most})


@pytest.mark.full
def test_a_model_of_6_7_billion_parameters_is_traced_without_allocating() -> None:
    graph = graph_of_step(
        steps.decoder(
            hidden=4096,
            layers=32,
            heads=32,
            inner=11008,
            vocabulary=32000,
            sequence=2048,
            llama=True,
        )
    )
    assert graph.parameters == 6_738_415_616  # Touvron et al. 2023: LLaMA 7B
    assert repeated_kinds(graph).total() == 64  # attention and feed-forward of 32 blocks
    assert len(repeated_kinds(graph)) == 2


@pytest.mark.full
def test_traced_gpt_agrees_with_the_analytic_count() -> None:
    sizes: dict[str, Any] = {
        "hidden": 2048,
        "layers": 24,
        "heads": 32,
        "vocabulary": 51_200,
        "sequence": 1024,
    }
    expected = transformer_graph(Transformer(name="gpt", **sizes))
    graph = graph_of_step(steps.decoder(**sizes))
    assert graph.parameters == pytest.approx(expected.parameters, rel=0.01)
    assert graph.flops.sum() == pytest.approx(expected.flops.sum(), rel=0.02)


@pytest.mark.night
def test_traced_mixture_of_experts_agrees_with_the_analytic_count() -> None:
    sizes: dict[str, Any] = {
        "hidden": 768,
        "layers": 16,
        "heads": 16,
        "vocabulary": 32_000,
        "sequence": 1024,
    }
    expected = mixture_graph(
        MixtureOfExperts(
            name="moe", intermediate=8 * 768, experts=16, every=2, capacity_factor=1.0, **sizes
        )
    )
    graph = graph_of_step(steps.decoder(inner=8 * 768, experts=16, samples=2, **sizes))
    assert graph.parameters == pytest.approx(expected.parameters, rel=0.01)
    assert graph.flops.sum() == pytest.approx(expected.flops.sum(), rel=0.03)
    assert graph.exchanged.sum() == pytest.approx(expected.exchanged.sum(), rel=0.01)
    assert graph.experts.max() == 16


def test_traced_wide_resnet_agrees_with_the_architecture() -> None:
    expected = find_published("wide_resnet", "500M").graph
    graph = graph_of_step(steps.wide_resnet(base=224, width=2, classes=1024))
    assert graph.parameters == pytest.approx(expected.parameters, rel=0.01)
    assert graph.flops.sum() == pytest.approx(expected.flops.sum(), rel=0.03)
    assert len(graph) == 18  # stem, 16 blocks, classifier


@pytest.mark.night
def test_traced_vit_and_t5_agree_with_their_architectures() -> None:
    vit, t5 = find_published("vit", "86M").graph, find_published("t5_3B", "3B").graph
    graph = graph_of_step(steps.vision(classes=200))
    assert graph.parameters == pytest.approx(vit.parameters, rel=0.01)
    assert graph.flops.sum() == pytest.approx(vit.flops.sum(), rel=0.03)
    graph = graph_of_step(
        steps.encoder_decoder(
            hidden=1024,
            layers=24,
            heads=32,
            head_width=128,
            inner=16_384,
            vocabulary=32_128,
            sequence=512,
        )
    )
    assert graph.parameters == pytest.approx(t5.parameters, rel=0.01)
    assert graph.flops.sum() == pytest.approx(t5.flops.sum(), rel=0.03)


def test_repeated_blocks_have_one_kind_and_pass_one_tensor_on() -> None:
    graph = graph_of_step(a_decoder(layers=4))
    # the first attention layer adds positions
    assert sorted(repeated_kinds(graph, most=3).values()) == [3, 4]
    assert (graph.boundary[:-1] == 32 * 64).all()
    assert graph.boundary[-1] == 0


def test_tensor_parallelism_reduces_after_attention_and_after_the_feed_forward_net() -> None:
    graph = graph_of_step(a_decoder())
    assert (graph.reduced[1:-1] == 32 * 64).all()
    assert graph.tensor_limit[1] == 4  # number of heads
    # the table; query, key, value and out; into and out
    assert graph.weights[:3].tolist() == [512 * 64, 4 * 64 * 64, 2 * 64 * 256]


@pytest.mark.parametrize(("heads", "limit"), [(4, 4), (5, 1), (6, 2), (12, 4)])
def test_tensor_groups_of_a_traced_step_divide_whole_heads(heads: int, limit: int) -> None:
    graph = graph_of_step(a_decoder(heads=heads, hidden=16 * heads))
    assert graph.tensor_limit[1] == limit


def test_attention_keeps_what_korthikanti_counts_without_dropout() -> None:
    """Without masks, a block keeps 32 s h + 2 a s^2 bytes (Korthikanti et al. 2022, eq. (1))."""
    graph = graph_of_step(a_decoder(hidden=128, sequence=64))
    s, h, a = 64, 128, 4
    kept = graph.kept[3:5].sum() + graph.boundary[3:5].sum()
    assert kept == pytest.approx((32 * s * h + 2 * a * s * s) / 2, rel=0.05)


def test_checkpointed_blocks_keep_only_their_inputs() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.checkpoint(lambda y: jnp.tanh(jnp.tanh(y @ w) @ w))(x) @ w)

    def kept(f: Callable[[Any, Any], Any]) -> float:
        graph = graph_of_step(a_step(f))
        return float(graph.kept.sum() + graph.boundary.sum())

    assert kept(loss) < kept(lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) @ w))


def test_a_scan_over_layers_equals_the_unrolled_layers() -> None:
    def scanned(w: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, w)[0])

    def written(w: Any, x: Any) -> Any:
        for i in range(5):
            x = jnp.tanh(x @ w[i])
        return jnp.mean(x)

    one, other = (
        graph_of_step(a_step(scanned, (5, 8, 8))),
        graph_of_step(a_step(written, (5, 8, 8))),
    )
    assert one.flops.sum() == other.flops.sum() == 5 * (2 * 64 + 8) + 8 + 0.25
    assert one.parameters == other.parameters == 320
    assert list(one.weights) == [64] * 5
    assert one.kept.sum() + one.boundary.sum() == other.kept.sum() + other.boundary.sum()


def test_a_long_scan_counts_every_turn_without_being_unrolled() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, 60_000)[0])

    assert graph_of_step(a_step(loss)).flops.sum() == pytest.approx(60_000 * (2 * 64 + 8), rel=0.2)


def test_a_conditional_counts_as_its_costliest_branch() -> None:
    def loss(w: Any, x: Any) -> Any:
        y = jax.lax.cond(x.sum() > 0, lambda v: v @ w, lambda v: v @ w @ w, x)
        return jnp.mean(y)

    assert graph_of_step(a_step(loss)).flops.sum() >= 2 * 2 * 64


def test_convolutions_count_two_flops_per_multiply_add() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(
            jax.lax.conv_general_dilated(
                x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )

    batch = jax.ShapeDtypeStruct((2, 6, 6, 3), F32)
    flops = graph_of_step(a_step(loss, (3, 3, 3, 5), batch)).flops.sum()
    assert flops == 2 * (4 * 4 * 5) * 27 + 4 * 4 * 5


def test_amounts_per_sample_do_not_depend_on_the_batch() -> None:
    one, four = graph_of_step(a_decoder(samples=1)), graph_of_step(a_decoder(samples=4))
    assert one.flops == pytest.approx(four.flops)
    assert one.kept == pytest.approx(four.kept)


def test_a_tensor_part_has_its_share_of_the_work() -> None:
    whole, part = graph_of_step(a_decoder()), graph_of_step(a_decoder(tp=2))
    assert len(whole) == len(part)
    assert part.flops[1:-1].sum() == pytest.approx(whole.flops[1:-1].sum() / 2, rel=0.05)


def test_a_user_defined_step_is_found_by_name() -> None:
    assert graph_of_step(f"{__name__}:own_step").flops.sum() == pytest.approx(
        2 * 64 + 8 + 8, rel=0.1
    )


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("tests.unit.nowhere:f", "cannot be imported"),
        (f"{__name__}:nothing", "has no function nothing"),
        (__name__, "module:function"),
        (f"{__name__}:no_step", "must return"),
    ],
)
def test_a_missing_step_is_refused(target: str, says: str) -> None:
    with pytest.raises(Untraceable, match=says):
        load_step(target)


def branches(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w) if x.sum() > 0 else jnp.mean(w)


def selects(w: Any, x: Any) -> Any:
    return jnp.mean(x[x > 0]) + jnp.sum(w)


def loops(w: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.while_loop(lambda y: y.sum() > 1, lambda y: y @ w, x))


def counts(w: Any, x: Any) -> Any:
    turns = jax.lax.while_loop(lambda n: n < x.sum(), lambda n: n + 1, 0)
    return jnp.mean(x @ w) * turns


def calls_back(w: Any, x: Any) -> Any:
    y = jax.lax.stop_gradient(x)
    return jnp.mean(jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((4, 8), F32), y) @ w)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (branches, "branch with jax.numpy.where"),
        (selects, "select with a mask"),
        (loops, "number of turns depends on data"),
        (counts, "number of turns depends on data"),
        (calls_back, "cannot be counted"),
        (lambda w, x: x @ w, "one floating-point number"),
        (lambda w, x: jnp.mean(x @ w.T[:3]), "fails while it is traced"),
        (lambda w, x: jnp.sum(w), "does not depend on the batch"),
    ],
)
def test_programs_that_cannot_be_traced_are_refused_with_advice(
    loss: Callable[[Any, Any], Any], says: str
) -> None:
    with pytest.raises(Untraceable, match=says):
        graph_of_step(a_step(loss))


def test_dynamic_shapes_are_refused() -> None:
    (size,) = jax.export.symbolic_shape("b")
    with pytest.raises(Untraceable, match="fixed number"):
        graph_of_step(
            a_step(lambda w, x: jnp.mean(x @ w), batch=jax.ShapeDtypeStruct((size, 8), F32))
        )
    (wide,) = jax.export.symbolic_shape("w")
    odd = {"a": jax.ShapeDtypeStruct((4, 8), F32), "b": jax.ShapeDtypeStruct((4, wide), F32)}
    with pytest.raises(Untraceable, match="dynamic shape"):
        graph_of_step(a_step(lambda w, x: jnp.mean(x["a"] @ w) + jnp.mean(x["b"]), batch=odd))


def test_a_batch_with_leaves_of_unequal_length_is_refused() -> None:
    batch = [jax.ShapeDtypeStruct((n, 8), F32) for n in (4, 5)]
    with pytest.raises(Untraceable, match="same number of samples"):
        graph_of_step(a_step(lambda w, x: jnp.mean(x[0] @ w) + jnp.mean(x[1]), batch=batch))


@pytest.mark.full
def test_the_models_own_softmax_has_the_same_derivative_as_jaxs() -> None:
    x = jnp.linspace(-2.0, 3.0, 12).reshape(3, 4)
    ours = jax.jacobian(softmax)(x)
    assert jnp.allclose(ours, jax.jacobian(jax.nn.softmax)(x), atol=1e-6)


@pytest.mark.full
def test_the_models_compute_a_finite_loss() -> None:
    tiny = {"hidden": 16, "sequence": 8, "vocabulary": 32}
    mixture = a_decoder(experts=4, layers=2, dtype="f32", **tiny)
    for step in (mixture, a_decoder(llama=True, layers=1, **tiny)):
        params = jax.tree.map(lambda x: 0.02 * jnp.ones(x.shape, x.dtype), step.params)
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), step.batch)
        program = jax.jit(step.loss).lower(params, batch)
        assert math.isfinite(float(program.compile(compiler_options=QUICKLY)(params, batch)))


def test_layers_are_read_back_one_by_one() -> None:
    graph = graph_of_step(steps.perceptron(samples=4))
    assert len(graph) == 2
    assert layer_of(graph, 0).weights == 2 * 64 * 256


def test_without_jax_tracing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"tessera-scheduler\[estimator\]"):
        importlib.reload(tracing)


SAMPLES_PER_REPLICA = 2
TINY: dict[str, Any] = {
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "vocabulary": 512,
    "sequence": 32,
    "dtype": "f32",
}
NET = {"base": 16, "width": 1, "side": 32, "classes": 16}
PICTURES = {"hidden": 64, "layers": 2, "heads": 4, "side": 64, "patch": 8}


def estimated_bytes(
    function: str, arguments: dict[str, Any], dp: int, tp: int, *, zero: bool
) -> tuple[float, float]:
    """Return the ring bytes of a step in tensor groups and in data groups."""
    graph = graph_of_step(getattr(steps, function)(**arguments))
    stage = PlanStage(start=0, end=len(graph), dp=dp, tp=tp)
    training = Training(global_batch=SAMPLES_PER_REPLICA * dp, micro_batches=1)
    traffic = stage_traffic(graph, training, 2 if zero else 0, stage, last=True)
    return float(traffic.tensor[0]), float(traffic.data[0] + traffic.expert_data[0])


@pytest.mark.parametrize(
    ("function", "arguments", "dp", "tp", "zero", "tensor", "data", "within"),
    [
        ("decoder", TINY, 2, 2, False, 164_608, 272_900, 0.01),
        ("decoder", TINY | {"llama": 1}, 1, 2, False, 164_608, 0, 0.01),
        ("decoder", TINY | {"experts": 4, "expert_group": 64}, 2, 1, False, 0, 929_284, 0.001),
        ("decoder", TINY | {"dtype": "bf16"}, 2, 2, True, 82_816, 140_548, 0.05),
        ("wide_resnet", NET, 2, 1, False, 0, 6_062_916, 0.03),
        ("vision", PICTURES, 1, 2, False, 146_328, 0, 0.05),
        ("encoder_decoder", TINY, 1, 2, False, 402_816, 0, 0.05),
    ],
)
def test_estimated_collectives_are_near_those_that_xla_compiled(
    function: str,
    arguments: dict[str, Any],
    dp: int,
    tp: int,
    zero: bool,
    tensor: float,
    data: float,
    within: float,
) -> None:
    estimated = estimated_bytes(function, arguments, dp, tp, zero=zero)
    assert estimated == pytest.approx((tensor, data), rel=within)


def test_the_flops_of_a_compiled_step_are_three_times_those_of_the_forward_pass() -> None:
    graph = graph_of_step(steps.decoder(**TINY))
    compiled_flops = 29_281_864 * 4  # of 4 devices, with an optimizer of 10 a weight, for 4 samples
    assert 3 * graph.flops.sum() * 4 == pytest.approx(compiled_flops, rel=0.15)


def test_heads_that_do_not_divide_leave_attention_whole_so_no_plan_divides_them() -> None:
    arguments: dict[str, Any] = TINY | {"heads": 5, "hidden": 80}
    assert graph_of_step(steps.decoder(**arguments)).tensor_limit.min() == 1
    tensor, _ = estimated_bytes("decoder", arguments, 1, 2, zero=False)
    assert tensor > 1.6 * 123_648  # what XLA compiled
