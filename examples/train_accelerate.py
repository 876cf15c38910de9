"""Accelerate: train with PowerSGD, save, and resume.

    pip install ".[accelerate]"    # from a checkout of gradwire
    accelerate launch --num-processes 2 examples/train_accelerate.py                # 150 steps on two GPUs
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/train_accelerate.py    # or on the CPU

The second run continues from the checkpoint of the first. Checkpoints are in the folder checkpoints/train_accelerate,
or in the one given as an argument. On CPUs, ``accelerate launch`` starts one process only.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from gradwire.integrations.accelerate import attach, prepare_model

STEPS = 150


def main(folder: Path) -> None:
    """Take `STEPS` more steps; the main process prints the loss."""
    accelerator = Accelerator()
    set_seed(0)  # the same model on every rank
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model = prepare_model(accelerator, model)
    optimizer = accelerator.prepare(optimizer)
    attachment = attach(accelerator, model, "powersgd-r4", start_powerSGD_iter=10)
    if attachment is None:
        raise SystemExit("A single process sends no gradients. Start two.")
    state = attachment.state

    if folder.exists():
        accelerator.load_state(folder)
    accelerator.print(f"{accelerator.num_processes} processes, start at step {state.iter}")
    set_seed(state.iter + accelerator.process_index)  # different data on every rank
    for _ in range(STEPS):
        inputs = torch.randn(16, 64, device=accelerator.device)
        loss = nn.functional.mse_loss(model(inputs), torch.sin(inputs.flip(1)))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if state.iter % 50 == 0:
            accelerator.print(f"step {state.iter}: loss {loss.item():.3f}")
    rate, before, after = state.compression_stats()
    accelerator.print(f"PowerSGD sent {after:,} elements instead of {before:,}: {rate:.1f} times fewer")
    accelerator.save_state(folder)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("checkpoints/train_accelerate"), help="checkpoint folder"
    )
    main(parser.parse_args().folder)
