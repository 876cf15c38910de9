"""Compress a list of tensors with PowerSGD in a single process, without DDP or a process group.

    python examples/compress_tensors.py

Change the rank to see its effect on the payload and on the error of a single step. Over several steps, error feedback
reduces the error of the mean result.
"""

import argparse

import torch

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import LowRankBucket, LowRankPolicy, Step, powersgd_all_reduce


def main() -> None:
    """Compress the same gradients in 20 steps; print the error of the mean result and the payload."""
    torch.manual_seed(0)
    matrix = torch.randn(512, 16) @ torch.randn(16, 256)  # of rank 16
    convolution = (torch.randn(128, 8) @ torch.randn(8, 576)).view(128, 64, 3, 3)
    gradients = [matrix, convolution, torch.randn(512)]
    results = [torch.empty_like(gradient) for gradient in gradients]
    applied = [torch.zeros_like(gradient) for gradient in gradients]

    bucket = LowRankBucket(gradients, LowRankPolicy(rank=4).matrix_shapes(gradients))
    transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
    for step in range(20):
        algorithm = powersgd_all_reduce(Step.of(bucket, gradients, results, step, transport, workspace))
        run_algorithm(algorithm, transport)
        for total, result in zip(applied, results, strict=True):
            total += result
        if step in (0, 4, 19):
            errors = [
                (total / (step + 1) - gradient).norm() / gradient.norm()
                for total, gradient in zip(applied, gradients, strict=True)
            ]
            print(f"after {step + 1:2} steps, relative errors of the mean: {', '.join(f'{e:.2f}' for e in errors)}")
    print(f"sent {transport.payload_bytes / 20:,.0f} bytes per step instead of {sum(g.nbytes for g in gradients):,}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
