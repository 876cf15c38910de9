"""Lightning: train with PowerSGD, save, and resume.

    pip install ".[lightning]"    # from a checkout of gradwire
    python examples/train_lightning.py               # 2 epochs
    python examples/train_lightning.py --epochs 4    # 2 more, from the checkpoint of the first run

Lightning starts two processes, on two GPUs if there are two, otherwise on the CPU. Checkpoints are in the
folder checkpoints/train_lightning, or in the one given as an argument.
"""

import argparse
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrations.lightning import GradwireStrategy


class Regression(LightningModule):
    """A small network that learns a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Print the mean loss of the epoch, on rank 0."""
        self.print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss_epoch']:.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def main(folder: Path, epochs: int) -> None:
    """Train up to a number of epochs, from the last checkpoint in ``folder`` if there is one."""
    seed_everything(0, verbose=False)
    inputs = torch.randn(2048, 64)
    loader = DataLoader(TensorDataset(inputs, torch.sin(inputs.flip(1))), batch_size=16, shuffle=True)
    strategy = GradwireStrategy("powersgd-r4", start_powerSGD_iter=10)
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.device_count() >= 2 else "cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    trainer.fit(Regression(), loader, ckpt_path=last if last.exists() else None)
    state = strategy.attachment.state
    rate, before, after = state.compression_stats()
    trainer.print(f"PowerSGD sent {after:,} elements instead of {before:,}: {rate:.1f} times fewer; step {state.iter}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("checkpoints/train_lightning"), help="checkpoint folder"
    )
    parser.add_argument("--epochs", type=int, default=2, help="epochs in total, those of earlier runs included")
    options = parser.parse_args()
    main(options.folder, options.epochs)
