"""Hugging Face Trainer: train a small BERT with PowerSGD, save, and resume.

    pip install ".[transformers]"    # from a checkout of gradwire
    torchrun --nproc-per-node 2 examples/train_transformers.py               # 20 steps
    torchrun --nproc-per-node 2 examples/train_transformers.py --steps 40    # 20 more, from the last checkpoint

Each process uses one GPU if there are GPUs, and the CPU with gloo if there are none. Nothing is downloaded.
Checkpoints are in the folder checkpoints/train_transformers, or in the one given as an argument.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from gradwire.integrations.transformers import GradwireCallback


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Random sequences; the label says whether the first token is in the upper half of the vocabulary."""

    def __init__(self) -> None:
        self.tokens = torch.randint(100, (2000, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": (tokens[0] >= 50).long()}


def main(folder: Path, steps: int) -> None:
    """Train up to a number of steps, from the last checkpoint in ``folder`` if there is one."""
    set_seed(0)  # the same model on every rank
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
    use_cuda = torch.cuda.is_available()
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_steps=20,
        report_to="none",
        use_cpu=not use_cuda,
        ddp_backend="nccl" if use_cuda else "gloo",
    )
    trainer = Trainer(model, arguments, train_dataset=Sequences())
    callback = GradwireCallback(trainer, "powersgd-r4", start_powerSGD_iter=5)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)
    if trainer.is_world_process_zero() and callback.attachment is not None:
        state = callback.attachment.state
        rate, before, after = state.compression_stats()
        print(f"PowerSGD sent {after:,} elements instead of {before:,}: {rate:.1f} times fewer; step {state.iter}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("checkpoints/train_transformers"), help="checkpoint folder"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps in total, those of earlier runs included")
    options = parser.parse_args()
    main(options.folder, options.steps)
