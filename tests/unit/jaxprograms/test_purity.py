"""A user's function that JAX would misunderstand is refused, with the name of its layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from tessera.jax.errors import ModelRefused
from tessera.jax.models import Layer, Model
from tessera.jax.purity import check_model

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


def test_a_pure_model_passes_with_and_without_keys() -> None:
    check()
    check(
        lambda own, values, keys: values if keys is None else values * keys.shape[0],
        is_random=True,
    )


def test_activations_whose_jaxprs_name_addresses_pass() -> None:
    check(lambda own, values: jax.nn.relu(jax.nn.gelu(values @ own["kernel"])))


def test_a_large_constant_of_a_closure_passes() -> None:
    mask = np.array([1.0, np.nan, -np.inf], np.float32)
    check(lambda own, values: jnp.where(mask > 0, values, 0))


def test_a_counter_is_refused() -> None:
    calls: list[int] = []

    def count(own: Any, values: jax.Array) -> jax.Array:
        calls.append(1)
        return values * len(calls)

    refuse("layer 'second' differs from call to call", apply=count)


@pytest.mark.parametrize("size", [None, 3])
def test_numpy_randomness_is_refused(size: int | None) -> None:
    draw = np.random.default_rng(1)
    refuse(
        "layer 'second' differs from call to call",
        apply=lambda own, values: values * draw.random(size),
    )


def test_randomness_of_an_init_is_refused() -> None:
    draw = np.random.default_rng(1)
    refuse(
        "init of layer 'second' differs from call to call",
        init=lambda key: {"kernel": jnp.asarray(draw.random((3, 3)), jnp.float32)},
    )


def test_a_hidden_state_that_only_evaluations_see_is_refused() -> None:
    draw = np.random.default_rng(1)
    refuse(
        "layer 'second' differs from call to call",
        apply=lambda own, values, keys: values * draw.random() if keys is None else values,
        is_random=True,
    )


def test_input_and_output_are_refused() -> None:
    def read(own: Any, values: jax.Array) -> jax.Array:
        result: jax.Array = io_callback(lambda x: x, values, values)
        return result

    refuse(r"layer 'second' has side effects \(IO\)", apply=read)


def test_a_print_is_allowed_but_not_in_order() -> None:
    def print_sum(own: Any, values: jax.Array, ordered: bool = False) -> jax.Array:
        jax.debug.print("{}", values.sum(), ordered=ordered)
        return values

    check(print_sum)
    refuse(
        r"side effects \(OrderedDebug\)",
        apply=lambda own, values: print_sum(own, values, ordered=True),
    )


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


def test_a_wrong_shape_names_the_layer_that_gets_it() -> None:
    def widen(key: jax.Array) -> Any:
        return {"kernel": jnp.zeros((5, 5))}

    refuse(r"layer 'second' cannot be applied to \(float32\[4, 3\]\)", init=widen)


def test_a_wrong_name_of_a_parameter_is_refused() -> None:
    refuse(
        "layer 'second' cannot be applied to .*kernle",
        apply=lambda own, values: values @ own["kernle"],
    )


def test_python_branches_on_values_are_refused() -> None:
    refuse(
        "layer 'second' cannot be applied",
        apply=lambda own, values: values if values.sum() > 0 else -values,
    )


@pytest.mark.parametrize(
    "apply",
    [
        lambda own, values: values.T,
        lambda own, values: values[:2],
        lambda own, values: jnp.mean(values),
        lambda own, values: (values, values.sum()),
    ],
)
def test_results_without_the_samples_first_are_refused(apply: Callable[..., Any]) -> None:
    refuse("layer 'second' returns an array of shape .* for 4 samples", apply=apply)


def test_no_results_are_refused() -> None:
    refuse("layer 'second' returns no array", apply=lambda own, values: None)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_parameters_of_another_type_are_refused(dtype: Any) -> None:
    refuse(
        "init of layer 'second' makes 'kernel' as",
        init=lambda key: {"kernel": jnp.zeros((3, 3), dtype)},
    )


def test_an_init_that_returns_no_arrays_is_refused() -> None:
    refuse("init of layer 'second'", init=lambda key: {"kernel": "zeros"})


@pytest.mark.parametrize(
    "loss",
    [
        lambda values, targets: values - targets,
        lambda values, targets: jnp.argmax(values),
        lambda values, targets: (jnp.mean(values), jnp.mean(targets)),
        lambda values, targets: None,
    ],
)
def test_a_loss_that_is_not_a_real_scalar_is_refused(loss: Callable[..., Any]) -> None:
    refuse("the loss is not a floating-point scalar", loss=loss)


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
