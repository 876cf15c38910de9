"""Unchanged programs of trainers under ``gradwire run``."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAMS = {
    "accelerate": """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader(torch.randn(480, 64), batch_size=8)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for batch in batches:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
accelerator.end_training()
""",
    "lightning": """
import lightning
import torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def training_step(self, batch, index):
        return self.linear(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

batches = torch.utils.data.DataLoader(torch.randn(480, 64), batch_size=8)
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **options)
trainer.fit(Model(), batches)
""",
}


@pytest.mark.parametrize("trainer", PROGRAMS)
def test_program_of_a_trainer_is_compressed_unchanged(tmp_path, trainer):
    if find_spec(trainer) is None:
        pytest.skip(f"needs {trainer}")
    path = tmp_path / "train.py"
    path.write_text(PROGRAMS[trainer])
    command = [sys.executable, "-m", "gradwire.cli", "run", "--standalone", "--nproc-per-node", "2", "--hook", "int4"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([*command, path], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert "4,160 parameters, 2 ranks, 30 steps" in done.stderr
    assert "times fewer bytes" in done.stderr
