"""Functions and plans that the trainer in JAX refuses, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

from tessera.jax.build import build_engine
from tessera.jax.errors import ModelRefused, PlanRefused
from tessera.jax.models import Layer, Model
from tessera.jax.pipelines import PipelineEngine
from tessera.jax.purity import check_model
from tessera.plans import ExecutionPlan, PlanStage
from tests.support.pipeline_models import BATCH, a_language_model, some_batches

INPUTS = np.ones((4, 3), np.float32)


def make_dense(key: jax.Array) -> Any:
    return {"kernel": jax.random.normal(key, (3, 3))}


def apply_dense(own: Any, values: jax.Array) -> jax.Array:
    return jnp.matmul(values, own["kernel"])


def find_mean(values: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(values - targets))


def check(
    apply: Callable[..., Any] = apply_dense,
    init: Callable[..., Any] = make_dense,
    loss: Callable[..., Any] = find_mean,
    *,
    is_random: bool = False,
) -> None:
    layers = (
        Layer(name="first", init=make_dense, apply=apply_dense),
        Layer(name="second", init=init, apply=apply, is_random=is_random),
    )
    check_model(Model(layers=layers, loss=loss), INPUTS, INPUTS)


def refuse(match: str, **functions: Any) -> None:
    with pytest.raises(ModelRefused, match=match):
        check(**functions)


def read_outside(own: Any, values: jax.Array) -> jax.Array:
    result: jax.Array = io_callback(lambda x: x, values, values)
    return result


def print_sum(own: Any, values: jax.Array, ordered: bool = False) -> jax.Array:
    jax.debug.print("{}", values.sum(), ordered=ordered)
    return values


def make_kernel(value: Any) -> Callable[[jax.Array], Any]:
    """Return an ``init`` of a layer with this kernel."""
    return lambda key: {"kernel": value() if callable(value) else value}


MASK = np.array([1.0, np.nan, -np.inf], np.float32)
DRAW = np.random.default_rng(1)
CALLS: list[int] = []


def count(own: Any, values: jax.Array) -> jax.Array:
    CALLS.append(1)
    return values * len(CALLS)


@pytest.mark.parametrize(
    "functions",
    [
        {},
        {"apply": lambda own, values: jax.nn.relu(jax.nn.gelu(values @ own["kernel"]))},
        {"apply": lambda own, values: jnp.where(MASK > 0, values, 0)},
        {"apply": print_sum},
        {
            "apply": lambda own, values, keys: values if keys is None else values * keys.shape[0],
            "is_random": True,
        },
    ],
    ids=["plain", "jaxprs name addresses", "large constant", "prints", "keys"],
)
def test_a_pure_model_passes(functions: dict[str, Any]) -> None:
    check(**functions)


DIFFERS = "layer 'second' differs from call to call"
SHAPE = "layer 'second' returns an array of shape .* for 4 samples"
LOSS = "the loss is not a floating-point scalar"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "counter": (DIFFERS, {"apply": count}),
    "random number": (DIFFERS, {"apply": lambda own, values: values * DRAW.random()}),
    "random array": (DIFFERS, {"apply": lambda own, values: values * DRAW.random(3)}),
    "random init": (
        f"init of {DIFFERS}",
        {"init": make_kernel(lambda: jnp.asarray(DRAW.random((3, 3)), jnp.float32))},
    ),
    "hidden state of evaluations": (
        DIFFERS,
        {
            "apply": lambda own, values, keys: values * DRAW.random() if keys is None else values,
            "is_random": True,
        },
    ),
    "input and output": (r"layer 'second' has side effects \(IO\)", {"apply": read_outside}),
    "ordered print": (
        r"side effects \(OrderedDebug\)",
        {"apply": lambda own, values: print_sum(own, values, ordered=True)},
    ),
    "wrong shape": (
        r"layer 'second' cannot be applied to \(float32\[4, 3\]\)",
        {"init": make_kernel(jnp.zeros((5, 5)))},
    ),
    "wrong name": (
        "layer 'second' cannot be applied to .*kernle",
        {"apply": lambda own, values: values @ own["kernle"]},
    ),
    "branch on values": (
        "layer 'second' cannot be applied",
        {"apply": lambda own, values: values if values.sum() > 0 else -values},
    ),
    "transposed": (SHAPE, {"apply": lambda own, values: values.T}),
    "fewer samples": (SHAPE, {"apply": lambda own, values: values[:2]}),
    "mean": (SHAPE, {"apply": lambda own, values: jnp.mean(values)}),
    "array and sum": (SHAPE, {"apply": lambda own, values: (values, values.sum())}),
    "nothing": ("layer 'second' returns no array", {"apply": lambda own, values: None}),
    "bf16": (
        "init of layer 'second' makes 'kernel' as",
        {"init": make_kernel(jnp.zeros((3, 3), jnp.bfloat16))},
    ),
    "integers": (
        "init of layer 'second' makes 'kernel' as",
        {"init": make_kernel(jnp.zeros((3, 3), jnp.int32))},
    ),
    "text": ("init of layer 'second'", {"init": make_kernel("zeros")}),
    "loss of samples": (LOSS, {"loss": lambda values, targets: values - targets}),
    "integer loss": (LOSS, {"loss": lambda values, targets: jnp.argmax(values)}),
    "two losses": (LOSS, {"loss": lambda values, targets: (jnp.mean(values), jnp.mean(targets))}),
    "no loss": (LOSS, {"loss": lambda values, targets: None}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_function_that_jax_would_misunderstand_is_refused(what: str) -> None:
    match, functions = REFUSED[what]
    refuse(match, **functions)


def test_an_array_that_another_call_left_behind_is_refused() -> None:
    kept: dict[str, jax.Array] = {}

    def keep(own: Any, values: jax.Array) -> jax.Array:
        kept.setdefault("mask", values > 0)
        return jnp.where(kept["mask"], values, 0)

    refuse("layer 'second' uses an array that another call or layer left behind", apply=keep)


def test_an_array_of_another_layer_that_did_not_come_by_the_values_is_refused() -> None:
    kept: dict[str, jax.Array] = {}

    def keep(own: Any, values: jax.Array) -> jax.Array:
        kept["mask"] = values > 0
        return values

    def use(own: Any, values: jax.Array) -> jax.Array:
        return jnp.where(kept["mask"], values, 0)

    layers = tuple(
        Layer(name=apply.__name__, init=make_dense, apply=apply) for apply in (keep, use)
    )
    with pytest.raises(ModelRefused, match="layer 'use' uses an array that another call or layer"):
        check_model(Model(layers=layers, loss=find_mean), INPUTS, INPUTS)


def test_inputs_without_samples_are_refused() -> None:
    layer = Layer(name="only", init=make_dense, apply=apply_dense)
    model = Model(layers=(layer,), loss=find_mean)
    with pytest.raises(ModelRefused, match="first axis, the samples"):
        check_model(model, (INPUTS, INPUTS[:2]), INPUTS)


def test_layers_of_one_kind_are_traced_once() -> None:
    calls: list[int] = []

    def apply(own: Any, values: jax.Array) -> jax.Array:
        calls.append(1)
        return apply_dense(own, values)

    layers = tuple(Layer(name=f"block-{i}", init=make_dense, apply=apply) for i in range(9))
    check_model(Model(layers=layers, loss=find_mean), INPUTS, INPUTS)
    assert len(calls) == 2


MODEL = a_language_model(0)
CHUNKS = (PlanStage(start=0, end=1), PlanStage(start=1, end=2))


def a_plan(**fields: Any) -> ExecutionPlan:
    usual: dict[str, Any] = {
        "micro_batch": BATCH // 2,
        "accumulation": 2,
        "schedule": "interleaved",
        "chunks": 2,
        "precision": "f32",
    }
    return ExecutionPlan(**{"stages": CHUNKS, **usual, **fields})


def an_engine(plan: ExecutionPlan) -> Any:
    return build_engine(MODEL, optax.sgd(0.1), plan, jax.devices(), seed=1)


def test_stages_on_several_hosts_are_refused() -> None:
    devices: Any = [SimpleNamespace(process_index=index) for index in range(2)]
    plan = a_plan(schedule="1f1b", chunks=1)
    with pytest.raises(PlanRefused, match="pipelines run on one host"):
        PipelineEngine(MODEL, optax.sgd(0.1), plan, devices, seed=1)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"precision": "fp8"}, "precision is fp8; tessera.jax knows f32, bf16"),
        ({"stages": tuple(replace(stage, cp=2) for stage in CHUNKS)}, "cp"),
    ],
)
def test_plans_that_only_other_runtimes_can_run_are_refused(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(PlanRefused, match=problem):
        an_engine(a_plan(**fields))


def test_batches_of_64_bit_numbers_train_as_those_of_32_bits_and_other_sizes_are_refused() -> None:
    engine = an_engine(a_plan())
    words = some_batches(1)[0]
    half = words[: BATCH // 2]
    with pytest.raises(PlanRefused, match="give whole global batches"):
        engine.run_iteration(engine.initial_state(1), half, half, 0)
    assert engine.library.compilations == 2  # what made the state
    losses = [
        float(engine.run_iteration(engine.initial_state(1), given, given, 0)[1])
        for given in (words, words.astype(np.int64))
    ]
    assert losses[0] == losses[1]
