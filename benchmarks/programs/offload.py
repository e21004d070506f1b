"""A program that times iterations of a GPT on one GPU, by execution plans that trade its resources.

It is in PyTorch, and needs nothing else. For each model, each plan and each number of threads it
prints a JSON object on a line: the size of the model, the plan, and the seconds of an iteration and
of its parts, or that the plan ran out of memory. The first line says where it runs.
``tessera.estimator.profiling.host`` times the host alone.

Plans differ by accumulation, activation checkpointing and ZeRO-Offload. With the latter, gradients
are copied to the host during the backward pass, the host's threads update the states, and the
parameters are copied back (Ren et al., ATC 2021). On one GPU, ZeRO divides nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 50_304
LEARNING_RATE = 1e-4
SEED = 1


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT."""

    name: str
    layers: int
    hidden: int
    sequence: int = 1_024
    head: int = 64


@dataclass(frozen=True)
class Plan:
    """The way in which an iteration is computed on one GPU."""

    accumulation: int = 1
    checkpointing: bool = False
    threads: int = 0  # that update the states on the host; 0 if the GPU updates them


MODELS = {
    sizes.name: sizes
    for sizes in (
        Sizes("gpt-tiny", 2, 128, sequence=64),
        Sizes("gpt-125m", 12, 768),
        Sizes("gpt-350m", 24, 1_024),
        Sizes("gpt-350m-4k", 24, 1_024, sequence=4_096),
        Sizes("gpt-760m", 24, 1_536, head=96),
        Sizes("gpt-1.3b", 24, 2_048),
        Sizes("gpt-1.3b-2k", 24, 2_048, sequence=2_048, head=128),
        Sizes("gpt-2.7b", 32, 2_560, head=80),
    )
}


class Block(nn.Module):
    """A layer of the model: attention, and two matrix products around a GELU."""

    def __init__(self, sizes: Sizes) -> None:
        """Make the parameters."""
        super().__init__()
        self.heads = sizes.hidden // sizes.head
        self.first, self.second = nn.LayerNorm(sizes.hidden), nn.LayerNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.up = nn.Linear(sizes.hidden, 4 * sizes.hidden)
        self.down = nn.Linear(4 * sizes.hidden, sizes.hidden)

    def forward(self, values: Any) -> Any:
        """Return the values after the layer, of the same shape (samples, sequence, hidden)."""
        samples, sequence, hidden = values.shape
        parts = self.qkv(self.first(values)).view(samples, sequence, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(mixed.transpose(1, 2).reshape(samples, sequence, hidden))
        return values + self.down(functional.gelu(self.up(self.second(values))))


class Gpt(nn.Module):
    """A GPT whose last product shares the parameters of the embedding."""

    def __init__(self, sizes: Sizes) -> None:
        """Make the parameters."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, sizes.hidden)
        self.places = nn.Embedding(sizes.sequence, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.last = nn.LayerNorm(sizes.hidden)

    def forward(self, tokens: Any, *, checkpointing: bool) -> Any:
        """Return the mean loss of predicting each token's successor."""
        values = self.tokens(tokens[:, :-1]) + self.places.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            values = (
                checkpoint(block, values, use_reentrant=False) if checkpointing else block(values)
            )
        logits = functional.linear(self.last(values), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class GpuStates:
    """States of Adam in single precision on the GPU, as mixed-precision training keeps them."""

    def __init__(self, model: nn.Module) -> None:
        """Copy the parameters."""
        self._held = list(model.parameters())
        self._master = [p.detach().float() for p in self._held]
        self._optimizer = torch.optim.AdamW(self._master, lr=LEARNING_RATE, fused=True)

    def close(self) -> None:
        """Do nothing: all memory is freed with this."""

    def update(self) -> None:
        """Update the parameters by their gradients, and clear these."""
        for master, held in zip(self._master, self._held, strict=True):
            master.grad = None if held.grad is None else held.grad.float()
            held.grad = None
        self._optimizer.step()
        for master, held in zip(self._master, self._held, strict=True):
            held.data.copy_(master)
            master.grad = None


class HostStates:
    """States of Adam in single precision in the host's memory.

    A gradient is copied as soon as the last backward pass of an iteration has made it.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Copy the parameters, and pin the memory for gradients."""
        pins = device.type == "cuda"
        self._held = list(model.parameters())
        self._master = [p.detach().float().cpu() for p in self._held]
        for master in self._master:
            master.grad = torch.zeros_like(master)
        self._sent = [torch.empty(p.shape, dtype=p.dtype, pin_memory=pins) for p in self._held]
        self._optimizer = torch.optim.AdamW(self._master, lr=LEARNING_RATE, fused=True)
        self._stream = torch.cuda.Stream() if pins else None
        self.is_last_pass = True
        self._hooks = [
            held.register_post_accumulate_grad_hook(lambda p, index=index: self._send(index, p))
            for index, held in enumerate(self._held)
        ]

    def close(self) -> None:
        """Remove the hooks. A parameter that has one is never freed, because it refers to this."""
        for hook in self._hooks:
            hook.remove()

    def _send(self, index: int, held: Any) -> None:
        if not self.is_last_pass:
            return
        if self._stream is None:
            self._sent[index].copy_(held.grad)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._sent[index].copy_(held.grad, non_blocking=True)
                held.grad.record_stream(self._stream)
        held.grad = None

    def update(self) -> None:
        """Update the states by the gradients, and copy the parameters to the GPU."""
        if self._stream is not None:
            self._stream.synchronize()
        for master, sent in zip(self._master, self._sent, strict=True):
            master.grad.copy_(sent)
        self._optimizer.step()
        for master, sent, held in zip(self._master, self._sent, self._held, strict=True):
            sent.copy_(master)
            held.data.copy_(sent, non_blocking=True)


def time_plan(
    sizes: Sizes, plan: Plan, batch: int, iterations: int, device: torch.device
) -> dict[str, Any]:
    """Return the median seconds of an iteration, and the parts of one more.

    The first one warms up. Its parts are timed in the last one only, because that delays the whole.
    """
    torch.manual_seed(SEED)
    torch.set_num_threads(plan.threads or os.cpu_count() or 1)
    with device:
        model = Gpt(sizes).to(torch.bfloat16)
    states = HostStates(model, device) if plan.threads else GpuStates(model)
    tokens = torch.randint(VOCABULARY, (batch, sizes.sequence + 1), device=device)
    whole, forward_s, update_s = [], 0.0, 0.0
    with contextlib.closing(states):
        for iteration in range(iterations + 2):
            parts = iteration > iterations
            seconds, ends = 0.0, _now(device)
            begin = ends
            for index, samples in enumerate(tokens.chunk(plan.accumulation)):
                if isinstance(states, HostStates):
                    states.is_last_pass = index == plan.accumulation - 1
                start = _now(device) if parts else 0.0
                loss = model(samples, checkpointing=plan.checkpointing) / plan.accumulation
                seconds += _now(device) - start if parts else 0.0
                loss.backward()
            start = _now(device) if parts else 0.0
            states.update()
            ends = _now(device)
            if parts:
                forward_s, update_s = seconds / plan.accumulation, ends - start
            elif iteration:
                whole.append(ends - begin)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "iter_time_s": statistics.median(whole),
        "forward_s": forward_s,
        "update_s": update_s,
        "iterations": len(whole),
        "spread": (max(whole) - min(whole)) / statistics.median(whole),
    } | ({"peak_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {})


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def plans_to_time(threads: list[int]) -> list[Plan]:
    """Return the plans of a model, from the fewest resources of the host to the most."""
    plans = [Plan(a, again) for again in (False, True) for a in (1, 2, 4)]
    plans += [Plan(a, again, t) for t in threads for a, again in ((1, False), (4, False))]
    return plans + [Plan(a, again, t) for t in threads[1:3] for a, again in ((1, True), (2, True))]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch._C._host_emptyCache()  # pinned memory, too


def main() -> None:
    """Time the plans that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt-350m,gpt-1.3b,gpt-2.7b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--threads", default="1,2,4,8,16", help="'': no plan with ZeRO-Offload")
    parser.add_argument("--seconds", type=float, default=1_800.0, help="after which none starts")
    given = parser.parse_args()
    threads = [int(word) for word in given.threads.split(",") if word]
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"torch": torch.__version__, "device": _device_name(device), "cpus": os.cpu_count()}
    sys.stdout.write(json.dumps(facts) + "\n")
    for name in given.models.split(","):
        for plan in plans_to_time(threads):
            if time.perf_counter() - started > given.seconds:
                sys.exit(f"stopped before {name} {plan}, after {given.seconds:g} s")
            row: dict[str, Any] = asdict(MODELS[name]) | {"batch": given.batch} | asdict(plan)
            began = time.perf_counter()
            try:
                row |= time_plan(MODELS[name], plan, given.batch, given.iterations, device)
            except torch.OutOfMemoryError:
                row["out_of_memory"] = True
            _free_memory(device)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            sys.stderr.write(f"{name} {plan}: {time.perf_counter() - began:.1f} s\n")


if __name__ == "__main__":
    main()
