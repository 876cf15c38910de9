"""`join`: training on unequal numbers of inputs. See features.py for the oracle."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import UNDER_HOOKS, assert_parity, of_both, over, under_hooks, views, ways, wrap, zero_grad
from tests.support.training import error_of, gradients, one_thread_group
from tests.support.zoo import Probe


def join_with_inputs(wrapper, hook, view, lengths, divide, clear="to-none", joins=True, find_unused=False, **options):
    """Train on ``lengths[rank]`` inputs under ``join``; without it, on inputs of zeros for as long as any rank.

    The gradients of `Probe` are its inputs, whatever its parameters are.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    shapes = [(6, 5), (7,), (4, 4), (3,)]
    ddp = wrap(wrapper, Probe(*shapes), hook, view, find_unused_parameters=find_unused, **options)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    with ddp.join(divide_by_initial_world_size=divide, enable=joins):
        for step in range(lengths[rank] if joins else max(lengths)):
            zero_grad(ddp, clear)
            inputs = [torch.randint(-8, 9, shape, generator=generator) * (step < lengths[rank]) for shape in shapes]
            ddp(*(12.0 * x for x in inputs)).backward()
            live = sum(length > step for length in lengths)
            gradient = gradients(ddp)
            if not joins and not divide:
                gradient = {name: g * (size / live) for name, g in gradient.items()}
            if step < lengths[rank]:
                seen.append(gradient)
    return seen, [p.detach().clone() for p in ddp.parameters()]


def join_with_both(**options):
    return of_both(join_with_inputs, **options)


divisions = pytest.mark.parametrize("divide", [True, False], ids=["by-all", "by-the-rest"])
uneven = pytest.mark.parametrize("lengths", [(5, 3, 1), (0, 4, 4), (2, 6, 3)], ids=str)


@pytest.mark.parametrize("clear", ["to-none", "kept"])
@views
@divisions
@uneven
@pytest.mark.parametrize("find_unused", [False, True], ids=["all-used", "find-unused"])
def test_law4_join_matches_pytorch(worlds, find_unused, lengths, divide, view, clear):
    options = {"lengths": lengths, "divide": divide, "find_unused": find_unused}
    ours = assert_parity(worlds(3).run(join_with_both, hook="none", view=view, clear=clear, **options))
    assert_same_on_all_ranks([parameters for _, parameters in ours])


def joined_and_zero_fed(**options):
    return join_with_inputs("gradwire", **options), join_with_inputs("gradwire", joins=False, **options)


@under_hooks
@divisions
@uneven
def test_joined_rank_adds_zeros_under_a_hook(worlds, lengths, divide, hook, view):
    # PyTorch's DDP divides by the number of all ranks under a hook, whatever is asked for.
    results = worlds(3).run(joined_and_zero_fed, lengths=lengths, divide=divide, hook=hook, view=view)
    for (joined, _), (fed, _) in results:
        assert_same_bits(joined, fed)


class Words(nn.Module):
    """Two sparse gradients and a dense one; all are whole multiples of 12, so that means are exact."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(7, 4, sparse=True)
        self.second = nn.EmbeddingBag(5, 3, sparse=True, mode="sum")
        self.vector = nn.Parameter(torch.ones(6))

    def forward(self, words):
        bags = self.second(words.remainder(5).view(-1, 2))
        return 12 * (self.first(words).sum() + 2 * bags.sum() + (self.vector * words).sum())


def words_of(rank, step):
    return torch.randint(7, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def join_with_words(hook, view, lengths, divide, find_unused):
    """The gradients of every step under `join`: whether they are sparse, and their values."""
    rank = dist.get_rank()
    group = {"process_group": one_thread_group()} if hook == "flat" else {}
    ddp = wrap("gradwire", Words(), hook, view, find_unused_parameters=find_unused, **group)
    seen = []
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(lengths[rank]):
            ddp.zero_grad()
            ddp(words_of(rank, step)).backward()
            seen.append({name: (gradient.is_sparse, gradient.to_dense()) for name, gradient in gradients(ddp).items()})
    return seen


def mean_over_live_ranks(lengths, step, divide):
    live = [rank for rank in range(len(lengths)) if lengths[rank] > step]
    module = Words()
    sum(module(words_of(rank, step)) for rank in live).backward()
    divisor = len(lengths) if divide else len(live)
    return {name: gradient.to_dense() / divisor for name, gradient in gradients(module).items()}


@over([*UNDER_HOOKS, ("none", False), ("none", True), ("int4", False)])
@divisions
@uneven
@pytest.mark.parametrize("find_unused", [False, True], ids=["all-used", "find-unused"])
def test_join_averages_sparse_gradients_over_ranks_with_inputs(world, find_unused, lengths, divide, hook, view):
    lengths = lengths[: world.size]
    options = {"lengths": lengths, "divide": divide, "find_unused": find_unused}
    results = world.run(join_with_words, hook=hook, view=view, **options)
    for steps, length in zip(results, lengths, strict=True):
        assert len(steps) == length
        for step, found in enumerate(steps):
            assert {name for name, (is_sparse, _) in found.items() if is_sparse} == {"first.weight", "second.weight"}
            expected = mean_over_live_ranks(lengths, step, divide)
            assert_same_bits({name: values for name, (_, values) in found.items()}, expected)


def join_exactly(hook, view, divide, lengths):
    """The gradient of every step under `join`; rank r's is 3 * 2 ** r, step s's 2 ** s times that."""
    rank = dist.get_rank()
    ddp = wrap("gradwire", Probe((3, 1), (2,)), hook, view)
    seen = []
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(lengths[rank]):
            ddp.zero_grad()
            ddp(torch.full((3, 1), 3.0 * 2 ** (rank + step)), torch.full((2,), -3.0 * 2 ** (rank + step))).backward()
            seen.append([weight.grad.clone() for weight in ddp.module.weights])
    return seen


@ways
@divisions
@uneven
def test_join_averages_over_ranks_with_inputs(world, lengths, divide, hook, view):
    # Matrices of one column are not compressed. A third of each gradient, and the sum of those, are exact in fp16 too.
    size, lengths = world.size, lengths[: world.size]
    results = world.run(join_exactly, hook=hook, view=view, divide=divide, lengths=lengths)
    for steps, length in zip(results, lengths, strict=True):
        assert len(steps) == length
        for step, (matrix, vector) in enumerate(steps):
            live = [rank for rank in range(size) if lengths[rank] > step]
            mean = sum(3 * 2 ** (rank + step) for rank in live) / (size if divide else len(live))
            assert_same_bits([matrix, vector], [torch.full((3, 1), mean), torch.full((2,), -mean)])


def end_early(wrapper, lengths):
    """The steps taken and the error of training that ends with the first rank's inputs; then a step that goes well."""
    ddp = wrap(wrapper, Probe(3))
    steps = []

    def train_on():
        with ddp.join(throw_on_early_termination=True):
            for step in range(lengths[dist.get_rank()]):
                ddp(torch.ones(3)).backward()
                steps.append(step)

    error = error_of(train_on)
    ddp.zero_grad()
    ddp(torch.full((3,), 6.0 * dist.get_rank())).backward()
    return steps, error, gradients(ddp)


def end_early_with_both(lengths):
    return of_both(end_early, lengths=lengths)


@uneven
def test_law4_join_with_early_termination_error_matches_pytorch(world, lengths):
    lengths = lengths[: world.size]
    results = assert_parity(world.run(end_early_with_both, lengths=lengths))
    for rank, (steps, error, _) in enumerate(results):
        assert len(steps) == min(lengths)
        is_first = lengths[rank] == min(lengths)
        assert (
            f"Rank {rank} exhausted all inputs" if is_first else "Detected at least one rank that exhausted"
        ) in error[1]
