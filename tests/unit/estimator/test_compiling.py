"""Steps compiled for devices that do not exist: their collectives, loops, types and cache."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tessera.estimator.compiling import cache
from tessera.estimator.compiling.collectives import collectives_of
from tessera.estimator.compiling.compile import CompileRequest, compile_step
from tessera.estimator.compiling.compiled import CompiledStep, Memory, Uncompilable
from tessera.estimator.compiling.hlo import groups_of, read_module
from tessera.estimator.plans import Primitive
from tessera.estimator.tracing.models import steps
from tessera.estimator.tracing.trace import graph_of_step

MODELS = "tessera.estimator.tracing.models.steps:"
TP_PAIRS, DP_PAIRS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
F32 = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def compile_target(
    folder: Path, target: str, *, dp: int = 2, tp: int = 2, zero: bool = False, **arguments: Any
) -> CompiledStep:
    request = CompileRequest(target=target, arguments=arguments, dp=dp, tp=tp, zero=zero)
    return compile_step(request, folder)


def count_collectives(
    step: CompiledStep,
) -> Counter[tuple[Primitive, float, tuple[tuple[int, ...], ...]]]:
    counts: Counter[tuple[Primitive, float, tuple[tuple[int, ...], ...]]] = Counter()
    for c in step.collectives:
        counts[c.primitive, c.payload_bytes, c.groups] += c.times
    return counts


def scanned(samples: int = 16) -> tuple[Any, Any, Any]:
    def loss(params: Any, x: Any) -> Any:
        def turn(carry: Any, w: Any) -> Any:
            return jax.nn.relu(carry @ w["into"]) @ w["out"], None

        return jnp.mean(jnp.square(jax.lax.scan(turn, x, params)[0]))

    shapes = {"into": (2, 64, 256), "out": (2, 256, 64)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    return loss, params, jax.ShapeDtypeStruct((samples, 64), jnp.float32)


def test_two_layers_on_2x2_devices_have_exactly_megatrons_collectives(folder: Path) -> None:
    step = compile_target(folder, MODELS + "perceptron", samples=16)
    activation = 8 * 64 * F32  # half the samples
    gradients = 4 * (64 * 128) * F32  # half of each weight
    # two forward; one backward, between the layers
    assert count_collectives(step) == {
        (Primitive.ALL_REDUCE, activation, TP_PAIRS): 3,
        (Primitive.ALL_REDUCE, gradients + F32, DP_PAIRS): 1,  # gradients and the loss
    }
    products = 4 + 4 + 3  # forward, weight gradients, activation gradients
    arithmetic = products * 2 * 8 * 64 * 128 + 4 * 64 * 128 * 10  # Adam takes about 10 a weight
    assert step.flops == pytest.approx(arithmetic, rel=0.1)
    assert step.memory.arguments == 12 * 4 * 64 * 128 + activation


@pytest.mark.full
def test_the_second_call_is_answered_identically_from_the_cache(folder: Path) -> None:
    first = compile_target(folder, MODELS + "perceptron", samples=32)
    second = compile_target(folder, MODELS + "perceptron", samples=32)
    assert not first.cached
    assert second.cached
    assert second.collectives == first.collectives
    assert (second.flops, second.bytes, second.memory) == (first.flops, first.bytes, first.memory)


def test_divided_optimizer_states_scatter_gradients_and_gather_weights_in_16_bits(
    folder: Path,
) -> None:
    step = compile_target(folder, MODELS + "perceptron", samples=16, dtype="bf16", zero=True)
    weights = 4 * (64 * 128) * 2
    assert step.total(Primitive.REDUCE_SCATTER) == weights
    assert step.total(Primitive.ALL_GATHER) == weights
    assert step.total(Primitive.ALL_REDUCE) == 3 * 8 * 64 * 2 + F32
    scatter = next(c for c in step.collectives if c.primitive is Primitive.REDUCE_SCATTER)
    assert scatter.corrected == ("reduce-scatter", "dtype")
    assert scatter.groups == DP_PAIRS


@pytest.mark.full
def test_the_communication_of_a_transformer_on_2x2_devices_matches_its_graph(folder: Path) -> None:
    arguments: dict[str, Any] = {
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "vocabulary": 512,
        "sequence": 32,
    }
    arguments |= {"samples": 4, "dtype": "f32"}
    step = compile_target(folder, MODELS + "decoder", **arguments)
    assert {(c.primitive, c.groups) for c in step.collectives} == {
        (Primitive.ALL_REDUCE, TP_PAIRS),
        (Primitive.ALL_REDUCE, DP_PAIRS),
    }
    activation = 2 * 32 * 64 * F32
    inside = sum(c.payload_bytes * c.times for c in step.collectives if c.groups == TP_PAIRS)
    # head; in each block, feed-forward, and the sum of query, key and value
    backward = (1 + 2 * (1 + 1)) * activation
    graph = graph_of_step(steps.decoder(**arguments))
    forward = graph.reduced.sum() * 2 * F32
    assert inside == pytest.approx(forward + backward, rel=0.01)
    assert step.flops == pytest.approx(3 * graph.flops.sum() * 4 / 4, rel=0.15)
    parameter_bytes = (graph.weights.sum() / 2 + graph.shared_weights.sum()) * F32
    synchronised = [c for c in step.collectives if c.groups == DP_PAIRS]
    # The table is used twice. The sum of its two gradients counts once.
    assert sum(c.payload_bytes for c in synchronised) == pytest.approx(parameter_bytes, rel=0.001)
    assert step.memory.arguments == pytest.approx(3 * parameter_bytes, rel=0.01)


@pytest.mark.full
def test_a_loop_is_counted_once_per_iteration(folder: Path) -> None:
    looped = compile_target(folder, f"{__name__}:scanned")
    written = compile_target(folder, MODELS + "perceptron", samples=16)
    assert max(c.times for c in looped.collectives) == 2
    # the loop carries the first layer's input
    assert looped.flops == pytest.approx(written.flops, rel=0.12)
    assert looped.total(Primitive.ALL_REDUCE, 2) == pytest.approx(
        written.total(Primitive.ALL_REDUCE, 2) + 8 * 64 * F32
    )


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (
            CompileRequest(target=MODELS + "perceptron", arguments={"samples": 3}, dp=2),
            "cannot be shared by 2",
        ),
        pytest.param(
            CompileRequest(target=MODELS + "nothing"), "has no function", marks=pytest.mark.full
        ),
        (CompileRequest(target=MODELS + "perceptron", dp=0), "at least 1"),
        pytest.param(
            CompileRequest(target=MODELS + "perceptron", arguments={"depth": 1}),
            "cannot be called",
            marks=pytest.mark.full,
        ),
    ],
)
def test_programs_that_cannot_be_compiled_are_refused(
    folder: Path, request_: CompileRequest, says: str
) -> None:
    with pytest.raises(Uncompilable, match=says):
        compile_step(request_, folder)


def a_module(body: str) -> str:
    return f"HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}", TP_PAIRS),
        ("[2,2]<=[4]", TP_PAIRS),
        ("[2,2]<=[2,2]T(1,0)", DP_PAIRS),
        ("mesh['a'=2,'b'=2] {'b'}", TP_PAIRS),
        ("mesh['a'=2,'b'=2] {'a'}", DP_PAIRS),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", TP_PAIRS),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", TP_PAIRS),
        ("{}", ((0, 1, 2, 3),)),
    ],
)
def test_replica_groups_are_parsed_in_every_form(
    written: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    text = a_module(
        "  %p = f32[8]{0} parameter(0)\n"
        f"  ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={written}, to_apply=%add"
    )
    module = read_module(text.replace(", to_apply=%add", ""))
    (instruction,) = [
        i for i in module.computations["main"].instructions.values() if i.opcode == "all-reduce"
    ]
    assert groups_of(instruction, 4) == groups


def test_groups_in_an_unknown_form_are_refused() -> None:
    text = a_module(
        "  %p = f32[8]{0} parameter(0)\n  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=<odd>"
    )
    with pytest.raises(Uncompilable, match="unknown form"):
        collectives_of(read_module(text), 4)


def test_a_true_reduce_scatter_counts_its_whole_input() -> None:
    text = a_module(
        "  %p = f32[8]{0} parameter(0)\n"
        "  ROOT %r = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}"
    )
    (found,) = collectives_of(read_module(text), 2)
    assert (found.primitive, found.payload_bytes) == (Primitive.REDUCE_SCATTER, 32)


def test_an_all_reduce_with_other_readers_is_not_turned_into_a_reduce_scatter() -> None:
    cut = "  %s = f32[4]{0} dynamic-slice(%r, %p), dynamic_slice_sizes={4}\n"
    text = a_module(
        "  %p = f32[8]{0} parameter(0)\n"
        "  %r = f32[8]{0} all-reduce(%p), replica_groups={{0,1}}\n"
        + cut
        + "  ROOT %t = f32[8]{0} add(%r, %r)"
    )
    (found,) = collectives_of(read_module(text), 2)
    assert found.primitive is Primitive.ALL_REDUCE
    (found,) = collectives_of(read_module(text.replace("add(%r, %r)", "add(%p, %p)")), 2)
    assert found.primitive is Primitive.REDUCE_SCATTER


def test_a_loop_with_an_unknown_trip_count_is_refused() -> None:
    text = a_module(
        "  %p = f32[8]{0} parameter(0)\n  ROOT %w = f32[8]{0} while(%p), condition=%main, body=%main"
    )
    with pytest.raises(Uncompilable, match="known number of turns"):
        read_module(text)


def test_text_in_another_form_is_refused() -> None:
    with pytest.raises(Uncompilable, match="another form"):
        read_module("module @jit_f {\n}\n")


def test_a_truncated_cache_file_is_ignored(tmp_path: Path) -> None:
    memory = Memory(arguments=1, outputs=2, aliased=1, temporaries=3)
    step = CompiledStep(
        name="m",
        dp=1,
        tp=1,
        collectives=(),
        flops=1.0,
        bytes=2.0,
        memory=memory,
        versions={"jax": "1"},
    )
    cache.store_step(tmp_path, "k", step)
    stored_step = cache.look_up_step(tmp_path, "k")
    assert stored_step is not None
    assert stored_step.memory == memory
    (tmp_path / "k.json").write_text((tmp_path / "k.json").read_text()[:40])
    assert cache.look_up_step(tmp_path, "k") is None
    (tmp_path / "k.json").write_text('{"name": 1}')
    assert cache.look_up_step(tmp_path, "k") is None
    assert cache.look_up_step(tmp_path, "other") is None


def test_another_mesh_or_version_has_another_cache_key() -> None:
    keys = {cache.key_of("text", facts) for facts in ((1, 2), (2, 1), (1, 2, "jax 2"))}
    assert len(keys | {cache.key_of("other", (1, 2))}) == 4


def test_asking_for_a_compilation_imports_no_jax() -> None:
    names = ", ".join(
        f"tessera.estimator.compiling.{name}" for name in ("compile", "collectives", "costs")
    )
    code = f"import sys, {names}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
