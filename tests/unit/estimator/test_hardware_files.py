"""The catalogue of GPU types, and types defined in a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.estimator.hardware import CATALOGUE, GIB, H100, V100, Link
from tessera.estimator.hardware.files import read_hardware
from tessera.formulation.base.errors import InvalidInput

FIELDS = {
    "name": "lab",
    "memory_gib": "48",
    "flops": "{f32: 60e12, f16: 120e12}",
    "memory_bytes_per_s": "864e9",
    "gpus_per_node": "4",
    "link": "pcie",
    "link_bytes_per_s": "16e9",
    "network_bytes_per_s": "25e9",
}


def a_file(folder: Path, **fields: str | None) -> Path:
    """Write a file with one GPU type, without the fields that are given as None."""
    kept = {k: v for k, v in {**FIELDS, **fields}.items() if v is not None}
    lines = [f"{'- ' if i == 0 else '  '}{k}: {v}" for i, (k, v) in enumerate(kept.items())]
    return a_text(folder, "\n  ".join(["hardware:", *lines]))


def a_text(folder: Path, text: str) -> Path:
    """Write a file with the given text."""
    path = folder / "hardware.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_user_defined_type_is_added_to_the_catalogue(tmp_path: Path) -> None:
    hardware = read_hardware(a_file(tmp_path))
    assert hardware[:-1] == CATALOGUE
    own = hardware[-1]
    assert (own.name, own.memory_bytes, own.link) == ("lab", 48 * GIB, Link.PCIE)
    assert (own.flops("f32"), own.flops("f16"), own.gpus_per_node) == (60e12, 120e12, 4)


def test_a_host_has_usual_rates_unless_they_are_given(tmp_path: Path) -> None:
    usual = read_hardware(a_file(tmp_path))[-1]
    own = read_hardware(a_file(tmp_path, host_bytes_per_s="64e9", host_update_bytes_per_s="2e11"))[
        -1
    ]
    assert (usual.host_bytes_per_s, usual.host_update_bytes_per_s) == (32e9, 100e9)
    assert (own.host_bytes_per_s, own.host_update_bytes_per_s) == (64e9, 2e11)
    assert (V100.host_bytes_per_s, H100.host_bytes_per_s) == (16e9, 64e9)


def test_a_type_derived_from_another_differs_only_in_the_given_fields(tmp_path: Path) -> None:
    path = a_text(tmp_path, "hardware: [{name: fast, like: h100, network_bytes_per_s: 4e11}]")
    own = read_hardware(path)[-1]
    assert own.network_bytes_per_s == 4e11
    assert own.memory_bytes == H100.memory_bytes
    assert own.flops("tf32") == H100.flops("tf32")


def test_a_catalogue_name_in_a_file_replaces_the_entry(tmp_path: Path) -> None:
    hardware = read_hardware(
        a_text(tmp_path, "hardware: [{name: h100, like: h100, gpus_per_node: 4}]")
    )
    assert len(hardware) == len(CATALOGUE)
    assert [k.gpus_per_node for k in hardware if k.name == "h100"] == [4]


@pytest.mark.parametrize("field", [f for f in FIELDS if f != "name"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"hardware\[0\]: lacks {field}"):
        read_hardware(a_file(tmp_path, **{field: None}))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("memory_gib", "-1", "memory_gib: must be a number from 1 to 4,096"),
        ("memory_gib", ".nan", "memory_gib: must be a number from 1 to 4,096, not '.nan'"),
        ("memory_bytes_per_s", "864", "memory_bytes_per_s: must be a number from 1e"),
        ("memory_bytes_per_s", "true", "memory_bytes_per_s: must be a number"),
        ("gpus_per_node", "2.5", "gpus_per_node: must be a whole number"),
        ("link", "nvlnk", "did you mean 'nvlink'"),
        ("flops", "{f32: 60, f16: 120e12}", "flops: f32: must be a number"),
        ("flops", "{f32: 60e12}", "lacks flops.f16"),
        ("flops", "{f32: 60e12, f16: 1e14, f8: 1e14}", "unknown key 'f8'"),
        ("like", "h1000", "like: must be one of"),
        ("memory_gb", "48", "unknown key 'memory_gb'; did you mean 'memory_gib'"),
        ("name", "''", "name: must be a name"),
    ],
)
def test_a_wrong_field_is_named_with_the_allowed_values(
    tmp_path: Path, field: str, value: str, complaint: str
) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        read_hardware(a_file(tmp_path, **{field: value}))


@pytest.mark.parametrize("text", ["", "hardware: []", "gpus: []", "hardware: [", "[1]"])
def test_a_file_without_types_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=r"hardware\.yaml"):
        read_hardware(a_text(tmp_path, text))


def test_a_type_given_twice_is_refused(tmp_path: Path) -> None:
    entry = "{name: fast, like: h100}"
    with pytest.raises(InvalidInput, match="occurs twice"):
        read_hardware(a_text(tmp_path, f"hardware: [{entry}, {entry}]"))


def test_half_precision_is_never_slower_than_full_and_links_never_faster_than_memory() -> None:
    for kind in CATALOGUE:
        assert kind.flops("f32") <= kind.flops("tf32") <= kind.flops("f16")
        assert kind.network_bytes_per_s < kind.memory_bytes_per_s
        assert kind.link_bytes_per_s < kind.memory_bytes_per_s


def test_bf16_on_a_v100_runs_at_the_rate_of_f32() -> None:
    assert V100.flops("bf16") == V100.flops("f32") < V100.flops("f16")
    with pytest.raises(ValueError, match="unknown type 'f8'"):
        V100.flops("f8")
