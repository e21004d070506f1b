"""The division of nodes among stages, against Alpa's own procedure written a second time."""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.submeshes import refuse_nodes, slice_nodes
from tests.support.laws import examples


def fill(sizes: list[int], nodes: int, node_gpus: int) -> bool:
    """Return whether GPUs handed out one by one, largest stage first, never cross a node's end."""
    free = [(node, gpu) for node in range(nodes) for gpu in range(node_gpus)]
    for size in sorted(sizes, reverse=True):
        mine, free = free[:size], free[size:]
        per_node = [sum(node == k for node, _ in mine) for k in {node for node, _ in mine}]
        is_part = len(per_node) == 1
        if len(mine) < size or not (is_part or set(per_node) == {node_gpus}):
            return False
    return not free


@examples(500)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 8))
def test_stages_fit_exactly_if_the_procedure_ends(
    sizes: list[int], nodes: int, node_gpus: int
) -> None:
    shapes = slice_nodes(sizes, nodes, node_gpus)
    assert (shapes is not None) == fill(sizes, nodes, node_gpus)
    if shapes is not None:
        assert [hosts * devices for hosts, devices in shapes] == sizes
        assert all(hosts == 1 or devices == node_gpus for hosts, devices in shapes)


class Mesh:
    """A mesh of equal hosts, as Alpa's procedure needs it."""

    def __init__(self, hosts: int, devices: int) -> None:
        self.num_hosts, self.num_devices_per_host = hosts, devices
        self.num_devices = hosts * devices

    def slice_2d(self, *_indices: Any) -> str:
        return "part"


def load_procedure(wheel: str) -> Callable[[Mesh, list[tuple[int, int]]], object]:
    """Return Alpa's own procedure, which needs nothing of Alpa but its text."""
    with zipfile.ZipFile(wheel) as files:
        tree = ast.parse(files.read("alpa/pipeline_parallel/stage_construction.py"))
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "get_sliced_virtual_submeshes"
    ]
    names: dict[str, Any] = {"np": np}
    exec(compile(tree, wheel, "exec"), names)
    procedure: Callable[[Mesh, list[tuple[int, int]]], object] = names[
        "get_sliced_virtual_submeshes"
    ]
    return procedure


@pytest.mark.skipif(
    "TESSERA_ALPA_WHEEL" not in os.environ,
    reason="TESSERA_ALPA_WHEEL names no wheel of Alpa (pip download alpa==0.2.3 --no-deps)",
)
@examples(500)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 8))
def test_alpas_own_procedure_agrees(sizes: list[int], nodes: int, node_gpus: int) -> None:
    procedure = load_procedure(os.environ["TESSERA_ALPA_WHEEL"])
    shapes = [(1, size) if size < node_gpus else (size // node_gpus, node_gpus) for size in sizes]
    divides = all(size < node_gpus or size % node_gpus == 0 for size in sizes)
    try:
        procedure(Mesh(nodes, node_gpus), shapes)
    except AssertionError:
        assert slice_nodes(sizes, nodes, node_gpus) is None
    else:
        assert (slice_nodes(sizes, nodes, node_gpus) is not None) == divides


@examples(200)
@given(st.data())
def test_powers_of_two_always_fit(data: st.DataObject) -> None:
    node_gpus, nodes = 2 ** data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    left, sizes = nodes * node_gpus, []
    while left:
        whole = [node_gpus * k for k in range(1, left // node_gpus + 1)]
        parts = [2**k for k in range(4) if 2**k < node_gpus and 2**k <= left]
        sizes.append(data.draw(st.sampled_from([*whole, *parts])))
        left -= sizes[-1]
    assert slice_nodes(sizes, nodes, node_gpus) is not None


@pytest.mark.parametrize(
    ("sizes", "shape", "problem"),
    [
        ([4, 4], (4, 4), ""),
        ([3, 1], (4,), ""),
        ([3, 3, 1, 1], (4, 4), "stages of 3, 3, 1, 1 GPUs on 2 nodes of 4"),
        ([6, 2], (4, 4), "whole nodes or a part of one"),
        ([2, 2], (3, 1), "different numbers of GPUs"),
    ],
)
def test_a_refusal_says_what_does_not_fit(
    sizes: list[int], shape: tuple[int, ...], problem: str
) -> None:
    assert (refuse_nodes(sizes, shape) == "") == (problem == "")
    assert problem in refuse_nodes(sizes, shape)
