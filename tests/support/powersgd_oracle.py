"""PowerSGD from its paper, for one matrix, with all ranks in one process, in fp64.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019. No code of the product, except for the random numbers that it starts with.
"""

import torch

from gradwire.kernels import Matrix, MatrixTable, draw, random_key


def random_q(name, columns, rank, step, part=0, seed=0, dtype=torch.float32):
    """The Q, m x r, that the product draws in ``step`` for matrix ``part`` of the parameter ``name``."""
    matrix = Matrix(columns, columns, rank, random_key(seed, f"{name}/{part}"))
    table = MatrixTable([matrix], dtype, torch.device("cpu"))
    q = torch.empty(table.q.numel, dtype=dtype)
    draw(table.q, table.keys, torch.tensor([step]), q)
    return table.q.views(q)[0].t()


def gram_schmidt(p):
    """Orthonormal columns with the same span: modified Gram-Schmidt."""
    p = p.clone()
    for c in range(p.shape[1]):
        p[:, c] /= p[:, c].norm()
        p[:, c + 1 :] -= torch.outer(p[:, c], p[:, c] @ p[:, c + 1 :])
    return p


def powersgd(steps, first, drawn, feedback=True, warm_start=True, alternating=False):
    """The decompressed means of algorithms 1 and 2, or of ACP-SGD (ICDCS 2023, algorithm 2) if ``alternating``.

    Args:
        steps: for each step, an n x m gradient in fp64 for each rank.
        first: number of the first step.
        drawn: function of a step's number that returns a random Q, m x r.
    """
    q, p, errors, results = drawn(first).double(), None, [0.0] * len(steps[0]), []
    for number, gradients in enumerate(steps, first):
        corrected = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        mean = sum(corrected) / len(corrected)
        if not warm_start:
            q = drawn(number).double()
        if not alternating:
            p = gram_schmidt(mean @ q)
            q = mean.t() @ p
        elif number % 2 == 0:
            q = gram_schmidt(q)
            p = mean @ q
        else:
            p = gram_schmidt(p)
            q = mean.t() @ p
        results.append(p @ q.t())
        if feedback:
            errors = [matrix - results[-1] for matrix in corrected]
    return results
