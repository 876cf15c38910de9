"""Lightning Fabric: train with 4-bit gradients, save, and resume.

    pip install ".[lightning]"    # from a checkout of gradwire
    python examples/train_fabric.py    # 150 steps
    python examples/train_fabric.py    # 150 more, from the checkpoint of the first run

Fabric starts two processes, on two GPUs if there are two, otherwise on the CPU. The checkpoint is the file
checkpoints/train_fabric.ckpt, or the one given as an argument.
"""

import argparse
from pathlib import Path

import torch
from lightning import Fabric
from torch import nn

from gradwire.integrations.fabric import GradwireStrategy

STEPS = 150


def main(path: Path) -> None:
    """Take `STEPS` more steps; rank 0 prints the loss."""
    accelerator = "gpu" if torch.cuda.device_count() >= 2 else "cpu"
    fabric = Fabric(strategy=GradwireStrategy("int4"), accelerator=accelerator, devices=2)
    fabric.launch()
    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    state = fabric.strategy.attachments[0].state

    parts = {"model": model, "optimizer": optimizer}
    if path.exists():
        fabric.load(path, parts)
    fabric.print(f"start at step {state.iter}")
    fabric.seed_everything(state.iter + fabric.global_rank, verbose=False)  # different data on every rank
    for _ in range(STEPS):
        inputs = torch.randn(16, 64, device=fabric.device)
        loss = nn.functional.mse_loss(model(inputs), torch.sin(inputs.flip(1)))
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        if state.iter % 50 == 0:
            fabric.print(f"step {state.iter}: loss {loss.item():.3f}")
    fabric.save(path, parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path("checkpoints/train_fabric.ckpt"), help="checkpoint file"
    )
    main(parser.parse_args().path)
