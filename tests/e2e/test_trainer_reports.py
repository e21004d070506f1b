"""A real Trainer of Hugging Face reports to the endpoint; skipped where transformers is missing."""

from __future__ import annotations

import os
import queue
import subprocess
from pathlib import Path

import pytest

from tessera.formulation.clock import SystemClock
from tessera.service.agent.keeper.trainer_endpoint import TrainerEndpoint, trainer_variables
from tessera.service.agent.trainer_certificate import make_certificate
from tests.support.patience import PATIENCE_S
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
def test_an_unchanged_script_reports_its_iterations_and_loss(tmp_path: Path) -> None:
    python = find_torch_python("transformers", "accelerate")
    reports: queue.Queue[tuple[int, float | None, int | None]] = queue.Queue()
    token = tmp_path / "token"
    token.write_text("trainer" + 8 * "-x")
    certificate, key = make_certificate(SystemClock().wall_s()).write_files(str(tmp_path))
    endpoint = TrainerEndpoint(
        certificate=certificate,
        key=key,
        token=token.read_text(),
        job="job",
        accept=lambda *report: reports.put(report),
    )
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("TESSERA_", "PYTHON"))},
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        **trainer_variables(endpoint.start(), certificate, str(token), {}),
    }
    output = tmp_path / "output.log"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [python, str(script)], env=environment, cwd=tmp_path, stdout=file, stderr=file
        )
    try:
        first, second = (reports.get(timeout=PATIENCE_S) for _ in range(2))
    except queue.Empty:
        pytest.fail(output.read_text())
    finally:
        process.kill()
        process.wait()
        endpoint.close()
    for iterations, loss, total in (first, second):
        assert iterations > 0
        assert total == 900_000
        assert loss is not None
        assert 0 < loss < 10
    assert second[0] > first[0]
    assert endpoint.remark == ""
