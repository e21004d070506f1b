"""The speed of a node's host: copies to and from a GPU, and updates of optimizer states on the CPU.

ZeRO-Offload (ATC 2021) keeps optimizer states in the host's memory, moves gradients and weights
between host and GPU, and updates the states on CPU cores. This module measures both, with PyTorch
or JAX if they see a GPU. Without a GPU, copies are left out with the reason.

    python -m tessera.estimator.profiling.host --json

measures this machine. It needs NumPy, and the frameworks only for copies.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput, TesseraError
from tessera.formulation.records.estimates import HostRates

STATE_BYTES: Final = 16
"""Bytes of a parameter in single precision with its gradient and Adam's two moments. As in the
estimator, all of them count as read and written (``costs.py``)."""

FRAMEWORKS: Final = ("auto", "torch", "jax")
"""Frameworks that may copy and update. ``auto`` is the first one that sees a GPU."""

MAX_GAP: Final = 500
"""Characters of a reason why something was not measured."""

_BLOCK: Final = 2**16
"""Parameters that a thread updates at once, so that its arrays stay in the caches."""
_LEARNING_RATE, _BETAS, _EPSILON = 1e-4, (0.9, 0.999), 1e-8
_FUSED_ON_CPUS: Final = (2, 4)
"""The first release of PyTorch whose fused Adam updates parameters on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEffort:
    """The amounts that are copied and updated. ``clock`` returns seconds.

    ``parameters`` are far more than caches hold. The fastest of ``repeats`` runs counts, because
    other work of the host can only add time.
    """

    parameters: int = 2**25
    copied_bytes: int = 2**28
    repeats: int = 4
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        """Check the amounts. Raises InvalidInput, which names the field."""
        for name in ("parameters", "copied_bytes", "repeats"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, f"must be at least 1, not {getattr(self, name)}")


def measure_host(
    framework: str = "auto", threads: Sequence[int] = (), effort: HostEffort | None = None
) -> HostRates:
    """Measure this machine's host; return its rates.

    ``threads`` are the numbers of CPU cores for which updates are measured. If it is empty, they
    are 1, 2, 4 ... and all cores that this process may use.

    Raises:
        InvalidInput: the framework is unknown or absent, or the numbers of threads are not possible
            here.
    """
    effort, there = effort or HostEffort(), available_cores()
    counts = sorted(set(threads)) or _usual_threads(there)
    if counts[0] < 1 or counts[-1] > there:
        raise InvalidInput("threads", f"must be from 1 to {there}, the cores of this process")
    copies = _measure_copies(framework, effort)
    updates = _fused_updates if _fuses_on_cpus(framework) else _numpy_updates
    method = ", ".join(dict.fromkeys(filter(None, (copies.method, _update_method(updates)))))
    return HostRates(
        to_device_bytes_per_s=copies.to_device_bytes_per_s,
        to_host_bytes_per_s=copies.to_host_bytes_per_s,
        copy_gap=copies.gap,
        updates=tuple((count, updates(count, effort)) for count in counts),
        method=method,
        device=copies.device,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
    )


def unmeasured_host(reason: str) -> HostRates:
    """Return the rates of a host of which nothing was measured, for a reason."""
    return HostRates(copy_gap=reason, update_gap=reason, device=_processor())


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _usual_threads(most: int) -> list[int]:
    powers = [2**power for power in range(most.bit_length())]
    return sorted({*powers, most})


def _processor() -> str:
    return f"{platform.machine()}, {available_cores()} CPU cores"


def _choose_framework(framework: str) -> tuple[str, str]:
    """Return the framework that copies, and "", or "" and the reason why none does.

    Raises:
        InvalidInput: it is unknown, or it was named and is not installed.
    """
    if framework not in FRAMEWORKS:
        raise InvalidInput("framework", f"must be one of {', '.join(FRAMEWORKS)}, not {framework}")
    names = FRAMEWORKS[1:] if framework == "auto" else (framework,)
    installed = [name for name in names if importlib.util.find_spec(name) is not None]
    if framework != "auto" and not installed:
        raise InvalidInput("framework", f"{framework} is not installed; install it, or use auto")
    for name in installed:
        if _SEES_GPU[name]():
            return name, ""
    if not installed:
        return "", "copies were not measured: neither PyTorch nor JAX is installed"
    return "", f"copies were not measured: no GPU is visible to {' or '.join(installed)} here"


def _torch_sees_gpu() -> bool:
    import torch  # noqa: PLC0415 - a node may lack it

    return bool(torch.cuda.is_available())


def _jax_sees_gpu() -> bool:
    import jax  # noqa: PLC0415 - a node may lack it

    return bool(jax.default_backend() == "gpu")


_SEES_GPU: Final[dict[str, Callable[[], bool]]] = {"torch": _torch_sees_gpu, "jax": _jax_sees_gpu}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """The bandwidths of copies, with the library and the device, or why nothing was copied."""

    to_device_bytes_per_s: float | None = None
    to_host_bytes_per_s: float | None = None
    method: str = ""
    device: str = ""
    gap: str = ""


def _measure_copies(framework: str, effort: HostEffort) -> _Copies:
    chosen, gap = _choose_framework(framework)
    if not chosen:
        return _Copies(device=_processor(), gap=gap)
    try:
        return _COPIES[chosen](effort)
    except (RuntimeError, MemoryError) as error:  # as both frameworks report a lack of memory
        gap = f"copies were not measured: {chosen} failed: {error}"[:MAX_GAP]
        return _Copies(device=_processor(), gap=gap)


def _torch_copies(effort: HostEffort) -> _Copies:
    """Return the bandwidths between pinned memory and the first GPU of PyTorch."""
    import torch  # noqa: PLC0415 - a node may lack it

    host = torch.ones(effort.copied_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(effort.copied_bytes, dtype=torch.uint8, device="cuda")

    def copy(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return _Copies(
        to_device_bytes_per_s=_rate(partial(copy, device, host), effort.copied_bytes, effort),
        to_host_bytes_per_s=_rate(partial(copy, host, device), effort.copied_bytes, effort),
        method=f"PyTorch {torch.__version__}",
        device=torch.cuda.get_device_name(),
    )


def _jax_copies(effort: HostEffort) -> _Copies:
    """Return the bandwidths between pinned memory and the first GPU of JAX."""
    import jax  # noqa: PLC0415 - a node may lack it
    from jax.sharding import SingleDeviceSharding  # noqa: PLC0415

    gpu = jax.devices()[0]
    on_host = SingleDeviceSharding(gpu, memory_kind="pinned_host")
    on_device = SingleDeviceSharding(gpu, memory_kind="device")
    device = jax.device_put(np.ones(effort.copied_bytes, dtype=np.uint8), on_device)
    host = jax.block_until_ready(jax.device_put(device, on_host))

    def copy(source: Any, target: Any) -> None:
        jax.block_until_ready(jax.device_put(source, target))

    return _Copies(
        to_device_bytes_per_s=_rate(partial(copy, host, on_device), effort.copied_bytes, effort),
        to_host_bytes_per_s=_rate(partial(copy, device, on_host), effort.copied_bytes, effort),
        method=f"JAX {jax.__version__}",
        device=str(gpu.device_kind),
    )


_COPIES: Final[dict[str, Callable[[HostEffort], _Copies]]] = {
    "torch": _torch_copies,
    "jax": _jax_copies,
}


def _rate(run: Callable[[], object], amount: float, effort: HostEffort) -> float:
    """Return ``amount`` per second of the fastest run after a first one that is not timed."""
    run()
    laps = []
    for _ in range(effort.repeats):
        start = effort.clock()
        run()
        laps.append(effort.clock() - start)
    return amount / min(laps)


def _fuses_on_cpus(framework: str) -> bool:
    """Return whether PyTorch may be used and has a fused Adam for CPUs."""
    if framework == "jax" or importlib.util.find_spec("torch") is None:
        return False
    import torch  # noqa: PLC0415 - a node may lack it

    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return release >= _FUSED_ON_CPUS


def _update_method(updates: Callable[[int, HostEffort], float]) -> str:
    if updates is _numpy_updates:
        return f"Adam in NumPy {np.__version__}"
    import torch  # noqa: PLC0415 - a node may lack it

    return f"fused Adam in PyTorch {torch.__version__}"


def _fused_updates(threads: int, effort: HostEffort) -> float:
    """Return the bytes of states that PyTorch's fused Adam updates in a second on some cores."""
    import torch  # noqa: PLC0415 - a node may lack it

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weights = torch.nn.Parameter(torch.rand(effort.parameters))
        weights.grad = torch.rand(effort.parameters)
        adam = torch.optim.Adam([weights], lr=_LEARNING_RATE, betas=_BETAS, fused=True)
        return _rate(adam.step, 2 * STATE_BYTES * effort.parameters, effort)
    finally:
        torch.set_num_threads(before)


def _numpy_updates(threads: int, effort: HostEffort) -> float:
    """Return the bytes of states that Adam in NumPy updates in a second on some cores.

    Each thread updates its part block by block. NumPy releases the interpreter's lock meanwhile. A
    fused optimizer passes over each block once, so it may be faster.
    """
    with _adam_threads(threads, effort.parameters) as update:
        return _rate(update, 2 * STATE_BYTES * effort.parameters, effort)


@contextmanager
def _adam_threads(threads: int, parameters: int) -> Iterator[Callable[[], object]]:
    """Yield a function that updates all parameters once, in equal parts on threads.

    Each thread makes its own part first, so that it is in the memory next to its core.
    """
    ends = np.linspace(0, parameters, threads + 1).astype(np.int64)
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(AdamStates, np.diff(ends).tolist()))
        yield lambda: list(pool.map(AdamStates.update, parts))


class AdamStates:
    """Parameters with their gradients and Adam's moments, each of shape (parameters,) in f32."""

    def __init__(self, parameters: int) -> None:
        draw = np.random.default_rng(parameters)
        self.weights, self.gradients = (draw.random(parameters, dtype=np.float32) for _ in range(2))
        self.means, self.squares = (np.zeros(parameters, dtype=np.float32) for _ in range(2))
        self.steps = 0
        self._scratch = np.empty(min(_BLOCK, parameters), dtype=np.float32)

    def update(self) -> None:
        """Update the parameters once (Kingma and Ba, ICLR 2015, algorithm 1)."""
        self.steps += 1
        first, second = (1.0 - beta**self.steps for beta in _BETAS)
        rate, epsilon = _LEARNING_RATE * second**0.5 / first, _EPSILON * second**0.5
        for start in range(0, len(self.weights), _BLOCK):
            rows = slice(start, start + _BLOCK)
            self._update_block(rows, rate, epsilon)

    def _update_block(self, rows: slice, rate: float, epsilon: float) -> None:
        gradients, mean, square = self.gradients[rows], self.means[rows], self.squares[rows]
        scratch = self._scratch[: len(gradients)]
        mean *= _BETAS[0]
        np.multiply(gradients, 1.0 - _BETAS[0], out=scratch)
        mean += scratch
        square *= _BETAS[1]
        np.multiply(gradients, gradients, out=scratch)
        scratch *= 1.0 - _BETAS[1]
        square += scratch
        np.sqrt(square, out=scratch)
        scratch += epsilon
        np.divide(mean, scratch, out=scratch)
        scratch *= rate
        self.weights[rows] -= scratch


def main(words: Sequence[str] | None = None) -> int:
    """Measure this machine and print the rates; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tessera.estimator.profiling.host", description=measure_host.__doc__
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="auto")
    parser.add_argument("--threads", default="", help="comma-separated numbers of CPU cores")
    parser.add_argument("--parameters", type=int, default=HostEffort().parameters)
    parser.add_argument("--copied-bytes", type=int, default=HostEffort().copied_bytes)
    given = parser.parse_args(words)
    effort = replace(HostEffort(), parameters=given.parameters, copied_bytes=given.copied_bytes)
    try:
        threads = [int(word) for word in given.threads.split(",") if word.strip()]
        rates = measure_host(given.framework, threads, effort)
    except (TesseraError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    text = json.dumps(asdict(rates)) if given.json else "\n".join(_lines(rates))
    sys.stdout.write(f"{text}\n")
    return 0


def _lines(rates: HostRates) -> list[str]:
    """Return the rates as lines of text, in GB/s."""
    copies = [
        f"{name}: {rate / 1e9:.2f} GB/s"
        for name, rate in (
            ("host to GPU", rates.to_device_bytes_per_s),
            ("GPU to host", rates.to_host_bytes_per_s),
        )
        if rate is not None
    ]
    updates = [
        f"update of states on {cores} CPU core{'s' * (cores > 1)}: {rate / 1e9:.2f} GB/s"
        for cores, rate in rates.updates
    ]
    return [f"{rates.device} ({rates.method})", *copies, *filter(None, [rates.copy_gap]), *updates]


if __name__ == "__main__":
    sys.exit(main())
