"""The places of parameters, states and values of a stage."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from tessera.jax.errors import ModelRefused, PlanRefused
from tessera.jax.layouts import AXES, DATA, StageLayout, _mesh_shape, constrain, stage_layouts
from tessera.jax.models import EXPERT, TENSOR, Layer, Model
from tessera.plans import ExecutionPlan, PlanStage, Schedule


def make_layout(zero: int = 0, sequence_axis: int | None = None, **degrees: Any) -> StageLayout:
    """Return a layout on devices that do not exist."""
    stage = PlanStage(start=0, end=1, **degrees)
    mesh: Any = AbstractMesh(_mesh_shape(stage), AXES)
    return StageLayout(stage=stage, mesh=mesh, zero=zero, sequence_axis=sequence_axis)


def make_layer(**divisions: PartitionSpec) -> Layer:
    return Layer(
        name="layer", init=lambda key: {}, apply=lambda own, values: values, divisions=divisions
    )


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def shard_shape(layout: StageLayout, division: PartitionSpec, *sizes: int) -> tuple[int, ...]:
    place = layout.parameters(make_layer(kernel=division), {"kernel": shape(*sizes)})["kernel"]
    divided: tuple[int, ...] = place.shard_shape(sizes)
    return divided


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"dp": 4, "tp": 2}, (4, 1, 1, 2)),
        ({"dp": 4, "tp": 2, "ep": 2}, (2, 2, 1, 2)),
        ({"dp": 2, "tp": 4, "ep": 4}, (1, 2, 2, 2)),
        ({"dp": 1, "tp": 4, "ep": 4}, (1, 1, 4, 1)),
    ],
)
def test_a_mesh_has_the_devices_of_its_stage(
    degrees: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert _mesh_shape(PlanStage(start=0, end=1, **degrees)) == expected


def test_experts_that_cross_replicas_unevenly_are_refused() -> None:
    with pytest.raises(PlanRefused, match="use an ep that divides dp"):
        _mesh_shape(PlanStage(start=0, end=1, dp=4, tp=3, ep=6))


@pytest.mark.parametrize(
    ("degrees", "division", "sizes", "expected"),
    [
        ({"tp": 4, "ep": 2}, (EXPERT, TENSOR), (2, 8), (1, 4)),  # experts take their axes first
        ({"tp": 4, "ep": 2}, (TENSOR, EXPERT), (8, 2), (4, 1)),
        ({"tp": 4, "ep": 2}, (None, TENSOR), (3, 8), (3, 2)),
        ({"zero": 3, "dp": 2, "tp": 2}, (TENSOR, None), (8, 3), (2, 3)),
        ({"zero": 3, "dp": 4, "ep": 2}, (EXPERT, None), (2, 6), (1, 3)),  # the other replicas only
        ({"zero": 3, "dp": 4}, (), (3,), (3,)),  # what does not divide stays whole
        ({"zero": 3, "dp": 4}, (), (6, 5), (6, 5)),
        ({"zero": 3, "dp": 4}, (), (), ()),
    ],
)
def test_parameters_are_divided_over_experts_tensors_and_replicas(
    degrees: dict[str, Any],
    division: tuple[str | None, ...],
    sizes: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    assert shard_shape(make_layout(**degrees), PartitionSpec(*division), *sizes) == expected


def test_an_axis_that_does_not_divide_is_refused_by_the_name_of_its_layer() -> None:
    with pytest.raises(PlanRefused, match=r"'layer': 4 devices cannot divide axis 1 of 'kernel'"):
        shard_shape(make_layout(tp=4), PartitionSpec(None, TENSOR), 8, 6)


def test_zero_divides_parameters_gradients_and_states_stage_by_stage() -> None:
    layer, shapes = make_layer(), {"kernel": shape(8, 6)}
    for zero in range(4):
        layout = make_layout(zero=zero, dp=4)
        divided = [
            places["kernel"].shard_shape((8, 6)) == (2, 6)
            for places in (
                layout.states(layer, shapes),
                layout.gradients(layer, shapes),
                layout.parameters(layer, shapes),
            )
        ]
        assert divided == [zero >= 1, zero >= 2, zero >= 3]


def test_values_are_divided_by_samples_and_with_sp_by_sequence() -> None:
    values = shape(8, 6, 3)
    plain = make_layout(dp=2, tp=2, sequence_axis=1).values(values)
    divided = make_layout(dp=2, tp=2, sp=True, sequence_axis=1).values(values)
    assert plain.shard_shape(values.shape) == (4, 6, 3)
    assert divided.shard_shape(values.shape) == (4, 3, 3)
    uneven = make_layout(dp=2, tp=4, sp=True, sequence_axis=1).values(shape(8, 6))
    assert uneven.spec == PartitionSpec(DATA)


def test_constrain_does_nothing_outside_of_a_program() -> None:
    values = jnp.ones((4, 2))
    assert constrain(values, "data", TENSOR) is values


def test_stages_have_devices_in_order_and_chunks_share_them() -> None:
    stages = tuple(PlanStage(start=i, end=i + 1) for i in range(4))
    plan = ExecutionPlan(
        stages=stages, micro_batch=1, accumulation=2, schedule=Schedule.INTERLEAVED, chunks=2
    )
    devices: Any = np.array(["first", "second"], dtype=object)
    meshes = [layout.mesh for layout in stage_layouts(plan, devices, None)]
    assert [str(mesh.devices.item()) for mesh in meshes] == ["first", "second"] * 2
    assert all(isinstance(mesh, Mesh) for mesh in meshes)


def test_two_axes_over_the_same_devices_are_refused() -> None:
    layer = Layer(
        name="square",
        init=lambda key: {"kernel": jnp.zeros((4, 4))},
        apply=lambda own, values: values,
        divisions={"kernel": PartitionSpec(TENSOR, TENSOR)},
    )
    model = Model(layers=(layer,), loss=lambda values, targets: jnp.mean(values))
    with pytest.raises(ModelRefused, match="'square' divides two axes of 'kernel'"):
        model.parameter_shapes()
