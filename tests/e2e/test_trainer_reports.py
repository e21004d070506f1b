"""A real Trainer of Hugging Face reports to its keeper; skipped where transformers is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessera.formulation.clock import SystemClock
from tessera.service.agent.runtimes.protocol import Progress
from tessera.service.agent.trainer_certificate import CertificateSource
from tests.support.agents import until
from tests.support.programs import ProgramBench
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
    output_dir="out", max_steps=900_000, per_device_train_batch_size=4, logging_steps=5,
    save_strategy="no", use_cpu=True, disable_tqdm=True,
)
Trainer(model=model, args=options, train_dataset=Repeated()).train()
"""
"""A script that knows nothing of Tessera. It trains for longer than any test waits."""


@pytest.mark.slow
async def test_an_unchanged_script_reports_its_iterations_and_loss(tmp_path: Path) -> None:
    python = find_torch_python("transformers", "accelerate")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    offline = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    bench = ProgramBench(tmp_path / "node")
    gang = bench.gang(
        (python, str(script)), iterations_total=900_000.0, launch={"environment": offline}
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    source = CertificateSource(SystemClock().wall_s())
    handle = bench.start(gang, certificates=source, environment=inherited)

    def progress() -> Progress:
        found = handle.observe()
        return found or Progress(iterations=0, iter_time_s=0)

    try:
        await handle.begun()
        await until(lambda: progress().iterations > 0)
        first = progress()
        await until(lambda: progress().iterations > first.iterations)
        second = progress()
    finally:
        await bench.clean()
    assert first.loss is not None
    assert second.loss is not None
    assert 0 < first.loss < 10
    assert 0 < second.loss < 10
    assert second.remark == ""
