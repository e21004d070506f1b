"""Hardware of users' files, and the speed of hosts: measured, stored with reasons, and priced."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.estimator.hardware import A100, CATALOGUE, GIB, H100, V100, Link
from tessera.estimator.hardware.files import read_hardware
from tessera.estimator.memory import States
from tessera.estimator.profiling.host import (
    STATE_BYTES,
    AdamStates,
    HostEffort,
    available_cores,
    main,
    measure_host,
    unmeasured_host,
)
from tessera.estimator.reconfiguration import MachineRates
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.estimates import HostRates

SMALL = ("--parameters", "4096")


class SteppingClock:
    """A clock that advances by a given number of seconds from one reading to the next."""

    def __init__(self, laps_s: Sequence[float]) -> None:
        self._steps = iter([step for lap in laps_s for step in (0.0, lap)])
        self._now = 0.0

    def __call__(self) -> float:
        self._now += next(self._steps)
        return self._now


def test_a_machine_without_gpu_measures_updates_and_says_why_it_copies_nothing() -> None:
    rates = measure_host("jax", effort=HostEffort(parameters=2**12))
    assert rates.updates[0][0] == 1
    assert rates.updates[-1][0] == available_cores()
    assert rates.copied_bytes_per_s is None
    assert "no GPU is visible to jax" in rates.copy_gap
    assert "Adam in NumPy" in rates.method


def test_the_fastest_run_counts_in_bytes_of_states_that_are_read_and_written() -> None:
    effort = HostEffort(parameters=1000, repeats=3, clock=SteppingClock([0.5, 0.25, 4.0]))
    rates = measure_host("jax", [1], effort)
    assert rates.updates == ((1, 2 * STATE_BYTES * 1000 / 0.25),)


def test_updates_are_those_of_adam() -> None:
    states = AdamStates(100_000)
    weights = states.weights.astype(np.float64)
    gradients = states.gradients.astype(np.float64)
    mean, square = np.zeros(100_000), np.zeros(100_000)
    for step in (1, 2, 3):
        states.update()
        mean = 0.9 * mean + 0.1 * gradients
        square = 0.999 * square + 0.001 * gradients**2
        fair_mean, fair_square = mean / (1 - 0.9**step), square / (1 - 0.999**step)
        weights -= 1e-4 * fair_mean / (np.sqrt(fair_square) + 1e-8)
    assert states.weights == pytest.approx(weights, abs=1e-6)


@pytest.mark.parametrize("threads", [[0], [-1, 1], [10**6]])
def test_numbers_of_cores_that_the_machine_lacks_are_refused(threads: list[int]) -> None:
    with pytest.raises(InvalidInput, match="the cores of this process"):
        measure_host("jax", threads)


def test_a_framework_that_is_unknown_or_absent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="one of auto, torch, jax, not tensorflow"):
        measure_host("tensorflow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InvalidInput, match="torch is not installed; install it, or use auto"):
        measure_host("torch")
    rates = measure_host("auto", [1], HostEffort(parameters=1000))
    assert rates.copy_gap == "copies were not measured: neither PyTorch nor JAX is installed"


@pytest.mark.parametrize("field", ["parameters", "copied_bytes", "repeats"])
def test_amounts_are_positive(field: str) -> None:
    amounts: dict[str, Any] = {field: 0}
    with pytest.raises(InvalidInput, match=rf"{field}.*at least 1"):
        HostEffort(**amounts)


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--framework", "jax", "--threads", "1", *SMALL]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [cores for cores, _ in printed["updates"]] == [1]
    assert printed["to_device_bytes_per_s"] is None
    assert main(["--framework", "jax", "--threads", "1", *SMALL]) == 0
    assert "update of states on 1 CPU core: " in capsys.readouterr().out


def test_the_command_refuses_what_the_machine_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--threads", "1000000", *SMALL]) == 2
    assert "the cores of this process" in capsys.readouterr().err


def test_a_rate_is_measured_or_has_a_reason() -> None:
    HostRates(copy_gap="no GPU", updates=((1, 1e9),))
    with pytest.raises(InvalidInput, match=r"copy_gap.*must say why"):
        HostRates(updates=((1, 1e9),))
    with pytest.raises(InvalidInput, match=r"update_gap.*must say why"):
        HostRates(copy_gap="no GPU", updates=((1, 1e9),), update_gap="no time")
    with pytest.raises(InvalidInput, match="copy_gap"):
        HostRates(to_device_bytes_per_s=1e9, updates=((1, 1e9),))
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidInput, match="above 0"):
            HostRates(copy_gap="no GPU", updates=((1, rate),))
    for cores in ((2, 1), (0, 1), (1, 1)):
        with pytest.raises(InvalidInput, match="rising numbers of cores"):
            HostRates(copy_gap="no GPU", updates=tuple((count, 1e9) for count in cores))


def test_measured_rates_replace_those_of_the_catalogue_in_prices() -> None:
    rates = HostRates(
        to_device_bytes_per_s=20e9, to_host_bytes_per_s=18e9, updates=((1, 10e9), (4, 30e9))
    )
    measured = A100.with_host(rates)
    assert States().moved_bytes_per_s(A100) == A100.host_bytes_per_s / 2
    assert States().moved_bytes_per_s(measured) == 18e9
    assert States().updated_bytes_per_s(measured) == 30e9
    assert measured.updated_bytes_per_s([0.5, 2.5, 64]).tolist() == [5e9, 20e9, 30e9]
    assert MachineRates.of(measured).pcie_bytes_per_s == 18e9


def test_what_was_not_measured_stays_as_in_the_catalogue() -> None:
    assert A100.with_host(unmeasured_host("a limit")) == A100
    half = A100.with_host(HostRates(copy_gap="no GPU", updates=((2, 5e9),)))
    assert half == replace(A100, host_update_bytes_per_s=5e9, core_rates=((2, 5e9),))


def test_cores_of_the_catalogue_update_their_share_up_to_the_whole() -> None:
    rates = A100.updated_bytes_per_s([A100.host_cores / 4, A100.host_cores, 10 * A100.host_cores])
    whole = A100.host_update_bytes_per_s
    assert rates == pytest.approx([whole / 4, whole, whole])


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
        ("memory_bytes_per_s", "864", "memory_bytes_per_s: must be a number from 1e"),
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
