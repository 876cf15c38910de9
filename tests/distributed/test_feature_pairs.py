"""Every pair of features of docs/ddp.md works or is refused with the error that its table of refused pairs names.

The gradients of `Net` are its inputs: integers whose mean over 1, 2 or 3 ranks is exact in every dtype used here. The
oracle computes the mean, and the buffers, from the inputs of all ranks, without DDP.
"""

from contextlib import ExitStack, nullcontext
from itertools import combinations_with_replacement

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import gradwire
from gradwire.cli.run import compressed
from tests.distributed.test_mixed_precision import no_streams
from tests.support.bits import differences
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import errors_of
from tests.support.training import HOOKS, WRAPPERS, register

CAP = 0.0001  # MiB: several buckets
EPOCH = 20  # numbers of forwards from one epoch to the next
MixedPrecision = torch.nn.parallel.distributed._MixedPrecision
LOCATIONS = torch.nn.parallel.distributed._BufferCommHookLocation

# Arguments of the constructor, if the feature is one.
FEATURES = {
    "join": {},
    "join by the rest": {},
    "no_sync": {},
    "evaluation": {},
    "buffer hook before": {},
    "buffer hook after": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "skip unused": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "views": {"gradient_as_bucket_view": True},
    "mixed precision": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.float32)},
    "optimizer in backward": {},
    "sparse": {},
    "check_every": {"check_every": 2},
    "delayed": {},
    "frozen": {},
    "manual": {},
}


class Net(nn.Module):
    """The loss is the sum of parameters times inputs; `seen` adds up what went through in training."""

    def __init__(self, features):
        super().__init__()
        self.third = nn.Parameter(torch.ones(40))  # in a bucket of its own
        self.first = nn.Parameter(torch.ones(6, 5))
        self.second = nn.Parameter(torch.ones(9, 4))
        self.fourth = nn.Parameter(torch.ones(4, 3))
        self.words = nn.Embedding(7, 4, sparse="sparse" in features)
        self.words.weight.data.fill_(1)
        self.second.requires_grad_("frozen" not in features)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs, words, use):
        if self.training:
            self.seen += inputs["third"][:2].float().abs()
        total = (12 * self.words(words)).sum() if "words.weight" in use else 0
        for name in ("first", "second", "third", "fourth"):
            if name in use:
                total = total + (getattr(self, name) * inputs[name]).sum()
        return total


NAMES = ("first", "second", "third", "fourth", "words.weight")
SHAPES = {"first": (6, 5), "second": (9, 4), "third": (40,), "fourth": (4, 3)}


def inputs_of(rank, number):
    """The inputs of a rank's forward of that number."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    inputs = {name: 12.0 * torch.randint(-2, 3, shape, generator=generator) for name, shape in SHAPES.items()}
    return inputs, torch.randint(7, (3,), generator=generator)


class Plan:
    """A training loop with some features, as every rank knows it."""

    def __init__(self, features, size):
        self.features, self.size = features, size
        self.joins = "join" in features or "join by the rest" in features
        self.per_step = 2 if "no_sync" in features else 1
        # Numbers of steps of the ranks in each epoch.
        epochs = [[2, 4, 3], [0, 2, 1]] if self.joins else [[5] * 3]
        if sum(map(len, features)) % 2:
            epochs.reverse()
        # With join and no_sync, rank 0 ends within an accumulation.
        ends_early = self.per_step - 1 if self.joins else 0
        self.epochs = [
            [max(0, self.per_step * n - (ends_early if rank == 0 else 0)) for rank, n in enumerate(steps[:size])]
            for steps in epochs
        ]

    def numbers(self, rank, epoch):
        """The numbers of a rank's forwards."""
        return range(EPOCH * epoch, EPOCH * epoch + self.epochs[epoch][rank])

    def use(self, rank, number):
        step = number // self.per_step
        if "static" in self.features:
            return [name for name in NAMES if name != "third"]
        if "skip unused" in self.features:
            return [name for name in NAMES if name != "third" or step % 2]
        if "unused" in self.features:
            left_out = {"third"} if step == 2 else {"first", "third"} if (step + rank) % 2 else {"words.weight"}
            return [name for name in NAMES if name not in left_out]
        return list(NAMES)

    def is_sync(self, number):
        return number % self.per_step == self.per_step - 1

    def own(self, rank, number):
        """The gradients that a rank adds in the step that ends with this forward; None where it has none."""
        found = dict.fromkeys(NAMES)
        for k in range(number - self.per_step + 1, number + 1):
            inputs, words = inputs_of(rank, k)
            table = torch.zeros(7, 4).index_add_(0, words, torch.full((3, 4), 12.0))
            for name in self.use(rank, k):
                found[name] = (0 if found[name] is None else found[name]) + (inputs | {"words.weight": table})[name]
        if "frozen" in self.features:
            found["second"] = None
        return found

    def live(self, number):
        return [rank for rank in range(self.size) if number in self.numbers(rank, number // EPOCH)]

    def sums(self, number):
        ranks = [self.own(rank, number) for rank in self.live(number)]
        return {name: None if all(one[name] is None for one in ranks) else sum(one[name] for one in ranks if one[name] is not None) for name in NAMES}

    def means(self, number):
        divisor = len(self.live(number)) if "join by the rest" in self.features else self.size
        return {name: each if each is None else each / divisor for name, each in self.sums(number).items()}


def sum_now(group, buffers):
    for buffer in buffers.values():
        dist.all_reduce(buffer, group=group)


def sum_later(group, buffers):
    return [dist.all_reduce(buffer, group=group, async_op=True).get_future() for buffer in buffers.values()]


class Buffers:
    """The buffer of every rank, computed without DDP."""

    def __init__(self, plan):
        self.plan, self.seen, self.synced = plan, [torch.zeros(2) for _ in range(plan.size)], True

    def end_epoch(self, epoch):
        if self.plan.joins:
            steps = self.plan.epochs[epoch]
            self.seen = [self.seen[max(rank for rank, n in enumerate(steps) if n == max(steps))]] * self.plan.size

    def step(self, number):
        plan = self.plan
        if "evaluation" in plan.features and not plan.joins:
            self.forward(number, is_training=False)
            self.synced = False
        self.forward(number)
        self.synced = plan.is_sync(number)

    def forward(self, number, is_training=True):
        plan, live = self.plan, self.plan.live(number)
        source = max(live) if plan.joins else 0
        hooks = [name for name in ("before", "after") if f"buffer hook {name}" in plan.features]
        if self.synced and not hooks:
            self.seen = [self.seen[source]] * plan.size
        if self.synced and "before" in hooks:
            self.seen = [sum(self.seen)] * plan.size
        for rank in live if is_training else ():
            self.seen[rank] = self.seen[rank] + inputs_of(rank, number)[0]["third"][:2].abs()
        if self.synced and "after" in hooks:
            self.seen = [sum(self.seen)] * plan.size


class Run:
    """A plan on this rank."""

    def __init__(self, plan, wrapper, hook, stack):
        self.plan, self.rank, self.hook = plan, dist.get_rank(), hook
        self.module = Net(plan.features)
        self.trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        options = {}
        for feature in plan.features:
            options |= FEATURES[feature]
        delayed = {"delayed": ["first", "fourth"]}
        for feature, names in delayed.items():
            if feature in plan.features:
                options["delay_all_reduce_named_params"] = [(name, self.module.get_parameter(name)) for name in names]
                options["param_to_hook_all_reduce"] = self.module.first
        self.updates = "optimizer in backward" in plan.features
        if self.updates:
            _apply_optimizer_in_backward(torch.optim.SGD, list(self.trained.values()), {"lr": 1.0})
        runs = stack.enter_context(compressed("int4")) if hook == "run" else None
        self.ddp = WRAPPERS[wrapper](self.module, bucket_cap_mb=CAP, **options)
        self.state = None
        if hook == "run":
            assert runs, "gradwire run has left the model alone"
            self.state = runs[0]._state
        elif hook != "none":
            self.state, function = HOOKS["int4"](None)
            if hook == "attach":
                gradwire.attach(self.ddp, self.state, function)
            else:
                register(self.ddp, (self.state, function))
        for name, location in (("before", LOCATIONS.PRE_FORWARD), ("after", LOCATIONS.POST_FORWARD)):
            if f"buffer hook {name}" in plan.features:
                self.ddp._register_buffer_comm_hook(None, sum_now if name == "before" else sum_later, location)
        if "manual" in plan.features:
            self.ddp.require_manual_backward_finalization = True

    def forward(self, number):
        inputs, words = inputs_of(self.rank, number)
        return self.ddp(inputs, words, self.plan.use(self.rank, number))

    def join(self):
        plan = self.plan
        return self.ddp.join(divide_by_initial_world_size="join" in plan.features) if plan.joins else nullcontext()

    def train(self):
        """Yields what this rank saw in each step: the reduced gradients, and the buffer."""
        for epoch in range(len(self.plan.epochs)):
            with self.join():
                for number in self.plan.numbers(self.rank, epoch):
                    if number % self.plan.per_step == 0:
                        self.ddp.zero_grad()
                    if "evaluation" in self.plan.features:
                        self.ddp.eval()
                        with torch.no_grad():
                            self.forward(number)
                        self.ddp.train()
                    before = {name: p.detach().clone() for name, p in self.trained.items()}
                    with nullcontext() if self.plan.is_sync(number) else self.ddp.no_sync():
                        self.forward(number).backward()
                    if self.plan.is_sync(number):
                        if "manual" in self.plan.features:
                            self.ddp.finalize_backward()
                        assert all(p.dtype == torch.float32 for p in self.module.parameters()), "low precision is left"
                        yield number, self.reduced(before), self.module.seen.clone()

    def reduced(self, before):
        if self.updates:
            assert all(p.grad is None for p in self.trained.values()), "gradients are left"
            return {name: before[name] - p.detach() for name, p in self.trained.items()}
        found = {name: None if p.grad is None else p.grad.clone() for name, p in self.trained.items()}
        with torch.no_grad():
            for p in self.trained.values():
                if p.grad is not None:
                    p.sub_(p.grad)
        return {name: each.to_dense() if each is not None and each.is_sparse else each for name, each in found.items()}


def outcome_of(features, wrapper, hook, size=None):
    """What becomes of features together, on this rank: violations, or the error that refuses them."""
    plan = Plan(features, dist.get_world_size())
    torch.manual_seed(0)
    with ExitStack() as stack:
        if "mixed precision" in features:
            stack.enter_context(no_streams())
        try:
            run = Run(plan, wrapper, hook, stack)
            seen = {number: rest for number, *rest in run.train()}
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        return problems_of(run, seen)


def problems_of(run, seen):
    """What is wrong with the results of a run."""
    plan, problems, buffers = run.plan, [], Buffers(run.plan)
    everyones = from_all_ranks(seen)
    final = from_all_ranks([p.detach() for p in run.module.parameters()] + [run.module.seen] * plan.joins)
    if any(differences(each, final[0]) for each in final[1:]):
        problems.append("the final models differ")
    lost = {name: torch.zeros_like(p) for name, p in run.trained.items()}
    n_compared = 0
    for epoch, steps in enumerate(plan.epochs):
        for number in range(EPOCH * epoch, EPOCH * epoch + max(steps)):
            buffers.step(number)
            if not plan.is_sync(number):
                continue
            n_compared += len(plan.live(number)) == plan.size
            expected = {name: each for name, each in plan.means(number).items() if name in run.trained}
            results = {rank: each[number] for rank, each in enumerate(everyones) if number in each}
            if sorted(results) != plan.live(number):
                problems.append(f"step {number}: of ranks {sorted(results)}")
            for rank, (found, seen) in results.items():
                if run.updates:
                    expected = {name: torch.zeros_like(found[name]) if each is None else each for name, each in expected.items()}
                lossless = expected if run.hook == "none" else results[min(results)][0]
                problems += [f"step {number}, rank {rank}: {line}" for line in differences(found, lossless)]
                if differences(seen, buffers.seen[rank]):
                    problems.append(f"step {number}, rank {rank}: buffer is {seen}, expected {buffers.seen[rank]}")
            for name, mean in expected.items():
                if mean is not None:
                    lost[name] += mean - found[name]
        buffers.end_epoch(epoch)
    if "check_every" in plan.features and run.ddp.reducer.drift._n_backwards != n_compared:
        problems.append(f"{run.ddp.reducer.drift._n_backwards} backwards of {n_compared} were counted")
    if run.hook != "none" and "join by the rest" not in plan.features:
        for name, error in errors_of(run.state.state_dict()).items():
            lost[name] -= error
        problems += [f"lost of {name}: {each.abs().max()}" for name, each in lost.items() if each.abs().max() > 1e-3]
    return problems
