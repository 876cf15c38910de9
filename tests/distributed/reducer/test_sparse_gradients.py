"""Sparse gradients, alone and together with dense ones. See features.py for the oracle."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import assert_parity, clearings, views, ways, wrap, zero_grad
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import gradients, one_thread_group, own_batches


class Words(nn.Module):
    """Embeddings, alone or among other layers; every sum of their gradients is exact."""

    def __init__(self, kind, sparse=True):
        super().__init__()
        self.kind = kind
        self.first = nn.Embedding(7, 4, sparse=sparse)
        if kind != "alone":
            self.linear = nn.Linear(4, 4)
            self.dense = nn.Embedding(5, 4)
            self.second = nn.EmbeddingBag(5, 4, sparse=sparse, mode="sum")
        if kind == "shared":
            self.third = nn.Embedding(7, 4, sparse=sparse)
            self.third.weight = self.first.weight

    def forward(self, words, use_second):
        x = self.first(words)
        if self.kind == "shared":
            x = x + 2 * self.third(words.flip(0))
        if use_second and self.kind != "alone":
            x = x + 4 * self.second(words.view(-1, 1))
        return x.sum() if self.kind == "alone" else x.sum() + self.linear(self.dense(words)).sum()


def as_dense(named):
    """Whether each gradient is sparse, and its values."""
    return {name: None if g is None else (g.is_sparse, g.to_dense()) for name, g in named.items()}


def train_words(wrapper, kind, hook, view, clear, sparse=True, **options):
    """Gradients of every step, and the parameters at the end. `second` is used on some ranks, and on none in step 3."""
    torch.manual_seed(0)
    group = {"process_group": one_thread_group()} if wrapper == "pytorch" or hook == "flat" else {}
    ddp = wrap(wrapper, Words(kind, sparse), hook, view, **group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    generator = own_batches()
    seen = []
    for step in range(5):
        zero_grad(ddp, clear)
        use_second = not options or (step != 3 and (step + dist.get_rank()) % 2 == 0)
        ddp(torch.randint(5, (6,), generator=generator), use_second).backward()
        seen.append(as_dense(gradients(ddp)))
        optimizer.step()
    return seen, [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("clear", ["to-none", "kept"])
@ways
@pytest.mark.parametrize("kind", ["alone", "mixed", "shared"])
@on_ranks(2)
def test_law4_sparse_gradients_match_pytorch(kind, hook, view, clear):
    ours = assert_parity(train_words, kind=kind, hook=hook, view=view, clear=clear)
    assert_same_on_all_ranks(from_all_ranks(ours))
    steps, _ = ours
    assert clear == "kept" or steps[-1]["first.weight"][0], "sparse, as without a wrapper"


# PyTorch's DDP fails where a sparse gradient is undefined on some rank.
@clearings
@views
@pytest.mark.parametrize("hook", ["none", "allreduce", "flat"])
@on_ranks(2)
def test_unused_sparse_gradients_equal_dense_ones(hook, view, clear):
    options = {"kind": "mixed", "view": view, "clear": clear, "find_unused_parameters": True}
    sparse = train_words("gradwire", hook=hook, **options)
    dense = train_words("pytorch", hook="none", sparse=False, **options)
    for step, reference in zip(sparse[0], dense[0], strict=True):
        for name, gradient in reference.items():
            assert_same_bits(step[name] and step[name][1], gradient and gradient[1])
    assert_same_bits(sparse[1], dense[1])
