"""Ray Train: train with PowerSGD, save, and resume.

    pip install ".[ray]"    # from a checkout of gradwire
    python examples/train_ray.py    # 150 steps on two workers
    python examples/train_ray.py    # 150 more, from the last checkpoint

Ray starts two workers, with one GPU each if there are two, otherwise on the CPU. Checkpoints are in the folder
checkpoints/train_ray, or in the one given as an argument.
"""

import argparse
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn

from gradwire import DistributedDataParallel, attach

STEPS = 150


def train(options: dict[str, str]) -> None:
    """Take `STEPS` more steps on one worker, and report the loss with a checkpoint."""
    device, rank = get_device(), ray.train.get_context().get_world_rank()
    torch.manual_seed(0)  # the same model on every worker
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    model = DistributedDataParallel(prepare_model(model, parallel_strategy=None))
    state = attach(model, "powersgd-r4", start_powerSGD_iter=10).state
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if last := options.get("checkpoint"):
        saved = torch.load(Path(last) / "checkpoint.pt", map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["hook"])

    torch.manual_seed(state.iter + rank)  # different data on every worker
    for _ in range(STEPS):
        inputs = torch.randn(16, 64, device=device)
        loss = nn.functional.mse_loss(model(inputs), torch.sin(inputs.flip(1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rate, _, _ = state.compression_stats()
    metrics = {"step": state.iter, "loss": loss.item(), "compression": rate}
    state.prepare_checkpoint()  # a collective call: the errors of all workers are averaged
    if rank > 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        parts = {"model": model.module, "optimizer": optimizer, "hook": state}
        torch.save({name: part.state_dict() for name, part in parts.items()}, Path(folder) / "checkpoint.pt")
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main(folder: Path) -> None:
    """Run two workers, from the newest checkpoint in ``folder`` if there is one."""
    folder = folder.resolve()  # Ray's workers have another working directory
    checkpoints = sorted(folder.rglob("checkpoint.pt"), key=lambda path: path.stat().st_mtime)
    trainer = TorchTrainer(
        train,
        train_loop_config={"checkpoint": str(checkpoints[-1].parent)} if checkpoints else {},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.device_count() >= 2),
        run_config=RunConfig(storage_path=str(folder)),
    )
    metrics = trainer.fit().metrics
    print("step {step}: loss {loss:.3f}, {compression:.1f} times fewer elements sent".format(**metrics))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("checkpoints/train_ray"), help="checkpoint folder")
    main(parser.parse_args().folder)
