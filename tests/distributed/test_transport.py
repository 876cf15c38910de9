"""Transport: which collectives may be under way at once."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from torch import nn

import gradwire
from gradwire.compress import Transport


class Unfinished:
    """A collective, and its future, that is done once somebody waits for it."""

    def __init__(self, tensor):
        self.is_sparse = tensor.is_sparse
        self.is_done = False

    def get_future(self):
        return self

    def then(self, _):
        return self

    def wait(self):
        self.is_done = True


# Two of a group corrupt the heap, within seconds (docs/log.md).
def test_one_sparse_all_reduce_is_under_way_at_once(monkeypatch):
    works = []

    def all_reduce(tensor, op, group, async_op):
        works.append(Unfinished(tensor))
        assert sum(work.is_sparse and not work.is_done for work in works) <= 1
        return works[-1]

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    transport = Transport(SimpleNamespace(size=lambda: 2))
    dense, sparse = torch.ones(3), torch.eye(3).to_sparse()
    for tensor in [sparse, dense, sparse, dense, sparse]:
        transport.start(transport.all_reduce(tensor))
    assert [work.is_done for work in works] == [True, False, True, False, False]


class Tables(nn.Module):
    """The sum of the entries that indices name in each of several tables."""

    def __init__(self, tables):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8, sparse=True) for _ in range(tables))

    def forward(self, words):
        return sum(table(words).sum() for table in self.tables)


def gradients_of_tables(steps):
    """How often each row was read, by a step; every table has the same gradient."""
    ddp = gradwire.DistributedDataParallel(Tables(8))
    words = (torch.arange(40) * (1 + dist.get_rank())) % 50
    for _ in range(steps):
        ddp.zero_grad()
        ddp(words).backward()
    return words, [parameter.grad.to_dense() for parameter in ddp.parameters()]


@pytest.mark.slow
def test_many_sparse_gradients_are_averaged_for_long(worlds):
    results = worlds(2).run(gradients_of_tables, steps=1500, limit=300)
    mean = sum(torch.bincount(words, minlength=50) for words, _ in results) / 2.0
    for _, gradients in results:
        for gradient in gradients:
            assert_same_bits(gradient, mean[:, None].expand(50, 8))
