"""PowerSGD from its paper, for one matrix, with all ranks in one process: what the tests of the hook compare with.

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


class PowerSGD:
    """Rank-r PowerSGD (algorithm 1) with error feedback (algorithm 2) for a matrix of n x m on every rank.

    Args:
        q: the first Q, m x r.
        world_size: number of ranks.
        dtype: dtype of all arithmetic.
        feedback: whether there is an error memory.

    Attributes:
        errors: the error memory of each rank.
    """

    def __init__(self, q, world_size, dtype=torch.float64, feedback=True):
        self.q = q.to(dtype)
        self.p = None
        self.dtype = dtype
        self.feedback = feedback
        self.errors = [torch.zeros((), dtype=dtype)] * world_size

    def step(self, gradients):
        """The decompressed mean of one n x m gradient a rank."""
        corrected = self._corrected(gradients)
        self.p = gram_schmidt(self._mean(m @ self.q for m in corrected))
        self.q = self._mean(m.t() @ self.p for m in corrected)
        return self._decompressed(corrected)

    def alternating_step(self, gradients, on_p):
        """A step that sends one side: P in even steps, Q in odd ones (ACP-SGD, ICDCS 2023, algorithm 2)."""
        corrected = self._corrected(gradients)
        if on_p:
            self.q = gram_schmidt(self.q)
            self.p = self._mean(m @ self.q for m in corrected)
        else:
            self.p = gram_schmidt(self.p)
            self.q = self._mean(m.t() @ self.p for m in corrected)
        return self._decompressed(corrected)

    def _corrected(self, gradients):
        return [g.to(self.dtype) + e for g, e in zip(gradients, self.errors, strict=True)]

    def _mean(self, products):
        return sum(products) / len(self.errors)

    def _decompressed(self, corrected):
        out = self.p @ self.q.t()
        if self.feedback:
            self.errors = [m - out for m in corrected]
        return out


def one_step_bound(corrected, q, wire=0.0):
    """How far one step in fp32 may be from `PowerSGD.step` in fp64, in the Frobenius norm, to first order.

    With u = 2^-24, sums of m, of n and of world_size terms round by m u, n u and world_size u of the sum of magnitudes,
    and Householder's QR by n u of each column. So column c of P is off by (m + n + world_size + 4) u |M|, where |M| is
    the mean norm over the ranks. Its span turns by no more than that over the smallest singular value of P, whose
    columns may be scaled at will; and the result, which is the projection of the mean of M, by as much of its norm.
    The products with the basis add (n + r + world_size + 4) u |M| sqrt(r).

    Args:
        corrected: G + E of each rank, fp64.
        q: the step's Q.
        wire: half a unit in the last place of the factors on the wire, where they are narrower than fp32: each rank's
            part and each sum is rounded to it.
    """
    world_size, (n, m), r = len(corrected), corrected[0].shape, q.shape[1]
    q = q / q.norm(dim=0)
    mean, size = sum(corrected) / world_size, sum(matrix.norm() for matrix in corrected) / world_size
    p = mean @ q
    parts_of_p = sum((matrix @ q).norm(dim=0) for matrix in corrected) / world_size
    off = (m + n + world_size + 4) * 2.0**-24 * size + world_size * wire * parts_of_p
    lengths = p.norm(dim=0)
    turned = (off / lengths).norm() / torch.linalg.svdvals(p / lengths)[-1]
    basis = gram_schmidt(p)
    parts_of_q = sum((matrix.t() @ basis).norm() for matrix in corrected) / world_size
    return turned * mean.norm() + (n + r + world_size + 4) * 2.0**-24 * r**0.5 * size + world_size * wire * parts_of_q
