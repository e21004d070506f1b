"""A small GPT that trains under Tessera on any number of GPUs, or of CPU processes.

Submit it with the runtime torchrun, or try it alone with ``python train_gpt.py --iterations 50``.
Three habits let Tessera stop it at any time and start it again on other GPUs:

* The samples of an iteration follow from the seed and the number of the iteration alone, so every
  world size computes the same global batch.
* Checkpoints name tensors as the model does, whatever the world size is
  (``torch.distributed.checkpoint``).
* All ranks agree after each iteration on whether to write a checkpoint and whether to stop.

Each rank keeps a ledger of the samples that it used: ``ledger/GENERATION-RANK.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tessera import progress

SAMPLES = 4096  # in an epoch


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model. Those of ``--help`` train in seconds on a CPU."""

    vocabulary: int
    sequence: int  # tokens
    width: int
    heads: int
    layers: int


class Block(nn.Module):
    """A layer: attention to earlier tokens, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, of the shape of its input."""
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.norms[0](x)).chunk(3, dim=-1)
        heads = [part.reshape(batch, length, self.heads, -1).transpose(1, 2) for part in parts]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class SmallGpt(nn.Module):
    """A decoder. If ``recomputes``, the backward pass computes activations of layers again."""

    def __init__(self, sizes: Sizes, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        width = sizes.width
        self.tokens = nn.Embedding(sizes.vocabulary, width)
        self.positions = nn.Embedding(sizes.sequence, width)
        self.blocks = nn.ModuleList(Block(width, sizes.heads) for _ in range(sizes.layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sizes.vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


@cache
def epoch_order(seed: int, epoch: int) -> list[int]:
    """Return the samples of an epoch in the order of their use."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(SAMPLES, generator=generator).tolist()


def global_samples(seed: int, iteration: int, batch: int) -> list[int]:
    """Return the samples of an iteration on all ranks: a function of its arguments alone."""
    positions = range(iteration * batch, (iteration + 1) * batch)
    return [epoch_order(seed, position // SAMPLES)[position % SAMPLES] for position in positions]


def load_sample(seed: int, sample: int, sizes: Sizes) -> Tensor:
    """Return a sample: tokens that advance by a constant step, which the model has to find out."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + SAMPLES + sample)
    start, step = torch.randint(sizes.vocabulary, (2,), generator=generator)
    return (start + (1 + step % 8) * torch.arange(sizes.sequence + 1)) % sizes.vocabulary


class Training:
    """The model, its optimizer and its data on this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, join_group()
        names = ("vocabulary", "sequence", "width", "heads", "layers")
        self.sizes = Sizes(**{name: getattr(options, name) for name in names})
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.batch = progress.global_batch(default=options.batch)
        plan: dict[str, Any] = progress.plan() or {}  # defaults are left out of a plan
        self.accumulation = plan.get("accumulation", 1)
        if self.batch % (self.world * self.accumulation):
            sys.exit(
                f"error: {self.world} ranks and {self.accumulation} micro-batches do not divide the"
                f" global batch of {self.batch}; change one of them"
            )
        torch.manual_seed(options.seed)
        model = SmallGpt(self.sizes, plan.get("recomputation") == "full").to(self.device)
        self.model = distribute(model, plan.get("zero", 0), self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.saved_iterations = -1
        folder = progress.job_dir(default=Path(options.folder)) / "ledger"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{os.environ.get('TESSERA_GENERATION', '0')}-{self.rank}.jsonl"
        self.ledger = (folder / name).open("a", encoding="utf-8")

    def own_parts(self, iteration: int) -> Iterator[list[int]]:
        """Yield this rank's samples of each micro-batch."""
        samples = global_samples(self.options.seed, iteration, self.batch)
        each = self.batch // (self.accumulation * self.world)
        for part in range(self.accumulation):
            start = (part * self.world + self.rank) * each
            yield samples[start : start + each]

    def run_iteration(self, iteration: int) -> tuple[float, bool, bool]:
        """Train an iteration. Return its loss, and whether to write a checkpoint and to stop."""
        self.optimizer.zero_grad()
        parts = list(self.own_parts(iteration))
        total = torch.zeros((), device=self.device)
        for index, samples in enumerate(parts):
            exchange_gradients(self.model, is_last=index == len(parts) - 1)
            tokens = torch.stack([load_sample(self.options.seed, s, self.sizes) for s in samples])
            tokens = tokens.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, self.options.precision == "bf16"):
                logits = self.model(tokens[:, :-1]).flatten(0, 1)
                mean = functional.cross_entropy(logits, tokens[:, 1:].flatten())
            share = mean * len(samples) / self.batch  # this rank's part of the batch's mean
            (share * self.world).backward()  # because gradients of ranks are averaged
            total += share.detach()
        self.optimizer.step()
        wants_checkpoint = self.rank == 0 and progress.checkpoint_requested()
        values = [total.item(), float(wants_checkpoint), float(progress.stop_requested())]
        agreed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(agreed)  # so that all ranks act after the same iteration
        loss = agreed[0].item()
        used = [sample for samples in parts for sample in samples]
        line = {"iteration": iteration, "samples": used, "loss": loss}
        self.ledger.write(json.dumps(line) + "\n")
        self.ledger.flush()
        return loss, bool(agreed[1]), bool(agreed[2])

    def save(self, iterations: int) -> None:
        """Write a checkpoint. It has its name only once it is complete."""
        if iterations == self.saved_iterations:
            return
        path = Path(progress.checkpoint_path(iterations))
        partial = path.with_name(f"{path.name}.partial")
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "iterations": iterations}
        dcp.save(state, checkpoint_id=partial)
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)  # of an earlier run in the same folder
            partial.rename(path)
            progress.report_checkpoint(iterations, path)
        dist.barrier()
        self.saved_iterations = iterations

    def load(self) -> int:
        """Return the number of iterations done, after reading the checkpoint if there is one."""
        path = progress.resume_path()
        if path is None:
            return 0
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "iterations": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        if state["iterations"] != progress.resume_iterations():
            sys.exit(f"error: {path} is a checkpoint of iteration {state['iterations']}")
        self.saved_iterations = progress.resume_iterations()
        return self.saved_iterations


def join_group() -> torch.device:
    """Join the group of all ranks, or a group of one. Return this rank's device."""
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic on GPUs
    torch.use_deterministic_algorithms(True)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def distribute(model: SmallGpt, zero: int, device: torch.device) -> nn.Module:
    """Return the model as the plan's ZeRO stage says: whole on each rank, or divided by FSDP2.

    FSDP2 also serves stage 1. It divides gradients as well, which needs less memory.
    """
    if zero == 0:
        return DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None
        )
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=zero == 3)
    fully_shard(model, reshard_after_forward=zero == 3)
    return model


def exchange_gradients(model: nn.Module, *, is_last: bool) -> None:
    """Let ranks exchange gradients in the last micro-batch only."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = is_last  # as its no_sync() does
    else:
        model.set_requires_gradient_sync(is_last)


def train(options: argparse.Namespace) -> None:
    """Train from the last checkpoint to the last iteration, or until a stop is requested."""
    progress.catch_stop()
    training = Training(options)
    total = progress.iterations_total(default=options.iterations)
    done, is_stopping = training.load(), False
    while done < total and not is_stopping:
        loss, wants_checkpoint, is_stopping = training.run_iteration(done)
        done += 1
        if training.rank == 0:
            used = torch.cuda.max_memory_allocated() if training.device.type == "cuda" else None
            progress.report(done, loss=loss, memory_bytes=used)
            print(f"iteration {done} loss {loss:.6f}", flush=True)
        if wants_checkpoint or is_stopping or done == total or done % options.every == 0:
            training.save(done)
        time.sleep(options.pause_s + options.work_s / training.world)
    training.ledger.close()
    dist.destroy_process_group()


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=100, help="if Tessera gives no number")
    parser.add_argument("--batch", type=int, default=16, help="if Tessera gives no global batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=20, help="iterations between checkpoints")
    parser.add_argument("--folder", default="train_gpt", help="if Tessera gives none")
    parser.add_argument("--precision", default="f32", choices=("f32", "bf16"))
    parser.add_argument("--layers", type=int, default=2, help="without embeddings and the head")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=2, help="of attention, which divide the width")
    parser.add_argument("--sequence", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--pause-s", type=float, default=0.0, help="waits, for demonstrations")
    parser.add_argument("--work-s", type=float, default=0.0, help="waits that the GPUs share")
    return parser.parse_args()


if __name__ == "__main__":
    train(read_options())
