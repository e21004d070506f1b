"""A real Trainer of Hugging Face reports to its keeper; skipped where transformers is missing."""

from __future__ import annotations

import os

import pytest

from tessera.formulation.base.clock import SystemClock
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.service.agent.runtimes.protocol import ExitOutcome, MemberHandle
from tessera.service.agent.trainer_certificate import CertificateSource
from tests.support.agents import until
from tests.support.programs import ProgramBench, end_of, observed
from tests.support.torch_python import find_torch_python

SCRIPT = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Repeated(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}

torch.set_num_threads(1)
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
))
options = TrainingArguments(
    output_dir="out", max_steps={steps}, per_device_train_batch_size=4, logging_steps=5,
    save_strategy="no", use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(model=model, args=options, train_dataset=Repeated())
trainer.train()
"""
"""A script that knows nothing of Tessera."""

LAST_LINE = "from tessera import progress; progress.report(trainer.state.global_step)\n"
"""The line that reports the last iteration, as docs/training.md has it."""

ENDLESS = 900_000
"""Iterations that last longer than any test waits."""


def start(bench: ProgramBench, steps: int, last_line: str = "") -> MemberHandle:
    python = find_torch_python("transformers", "accelerate")
    script = bench.root.parent / "train.py"
    script.write_text(SCRIPT.replace("{steps}", str(steps)) + last_line)
    offline = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(bench.root.parent)}
    gang = bench.gang((python, str(script)), iterations_total=float(steps), launch={"env": offline})
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    source = CertificateSource(SystemClock().wall_s())
    return bench.start(gang, certificates=source, environment=inherited)


async def test_an_unchanged_script_reports_its_iterations_and_loss(bench: ProgramBench) -> None:
    handle = start(bench, ENDLESS)

    await handle.begun()
    await until(lambda: handle.observe() and observed(handle).iterations_done > 0)
    first = observed(handle)
    await until(lambda: observed(handle).iterations_done > first.iterations_done)
    second = observed(handle)
    assert first.HasField("loss")
    assert second.HasField("loss")
    assert 0 < first.loss < 10
    assert 0 < second.loss < 10
    assert "Trainer does not report its last iteration" in second.remark


@pytest.mark.parametrize("last_line", ["", LAST_LINE])
async def test_a_script_has_succeeded_if_its_last_line_reports_the_last_iteration(
    bench: ProgramBench, last_line: str
) -> None:
    handle = start(bench, 7, last_line)
    end = await end_of(handle)
    progress = observed(handle)
    if last_line:
        assert (end.outcome, progress.iterations_done) == (ExitOutcome.SUCCEEDED, 7)
    else:
        assert (end.reason, progress.iterations_done < 7) == (ExitReason.ENDED_EARLY, True)
