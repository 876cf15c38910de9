"""Every pair of features in docs/ddp.md trains correctly, or raises the error in its table of refused pairs.

The gradients of `Net` are its inputs: integers whose mean over 1, 2 or 3 ranks is exact in fp32 and bf16. The oracle
computes means and buffers from the inputs of all ranks, without DDP. Under a lossy hook, ranks must have equal bits,
and nothing may be lost (law 1).
"""

import copy
import random
import re
from contextlib import ExitStack, nullcontext
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from numpy import ndarray
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils._pytree import tree_map_only

import gradwire
from gradwire.cli.run_compression import compressed
from tests.support.bits import differences
from tests.support.features import CAP, MixedPrecision, no_streams
from tests.support.gpu_worker import SHARED_GPU
from tests.support.ranks import from_all_ranks
from tests.support.states import FEEDBACK, errors_of
from tests.support.training import HOOKS, WRAPPERS, error_of, failing_hook, register

LOCATIONS = torch.nn.parallel.distributed._BufferCommHookLocation
PAGE = Path(__file__).parents[3] / "docs" / "ddp.md"

# The features under their names on the page, with their arguments of the constructor.
JOIN, JOIN_REST = "`join()`", "`join(divide_by_initial_world_size=False)`"
NO_SYNC, EVALUATION = "`no_sync`", "forwards without gradients"
BEFORE, AFTER = "buffer hook before the forward", "buffer hook after the forward"
STATIC, UNUSED, SKIP = "`static_graph`", "`find_unused_parameters`", "`skip_all_reduce_unused_params`"
MIXED, OPTIMIZER, SPARSE = "`mixed_precision`", "optimizers in backward", "sparse gradients"
DRIFT, DELAYED, FROZEN, COPY = "`check_every`", "delayed parameters", "frozen parameters", "copies"
ERROR = "an error and `resynchronize()`"
MANUAL = "`finalize_backward()`"
FEATURES = {
    JOIN: {},
    JOIN_REST: {},
    NO_SYNC: {},
    EVALUATION: {},
    BEFORE: {},
    AFTER: {},
    STATIC: {"static_graph": True},
    UNUSED: {"find_unused_parameters": True},
    SKIP: {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "`gradient_as_bucket_view`": {"gradient_as_bucket_view": True},
    MIXED: {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.float32)},
    OPTIMIZER: {},
    SPARSE: {},
    DRIFT: {"check_every": 2},
    DELAYED: {},
    FROZEN: {},
    MANUAL: {},
    COPY: {},
    ERROR: {},
}
HOOK = "communication hooks"
ALTERNATIVES = [{JOIN, JOIN_REST}, {BEFORE, AFTER}]
PAIRS = [pair for pair in combinations(FEATURES, 2) if set(pair) not in ALTERNATIVES]
if SHARED_GPU:  # NCCL does not sum sparse tensors
    PAIRS = [pair for pair in PAIRS if SPARSE not in pair]

# What PyTorch's class does not do on CPUs, whatever its hook: it needs an accelerator, lacks the feature, does not wait
# for delayed parameters, fails (static graphs in no_sync), or waits forever.
NOT_ON_PYTORCH = [{MIXED}, {OPTIMIZER}, {DRIFT}, {DELAYED}, {MANUAL}, {COPY}, {ERROR}, {JOIN_REST}]
NOT_ON_PYTORCH += [{JOIN, EVALUATION}, {JOIN, AFTER}, {JOIN, SKIP}, {JOIN, UNUSED}, {JOIN, SPARSE}]
NOT_ON_PYTORCH += [{NO_SYNC, STATIC}, {NO_SYNC, AFTER}, {EVALUATION, AFTER}, {UNUSED, SPARSE}]
# Class and way to register the hook.
SETTINGS = {
    "none": ("gradwire", None),
    "hook": ("gradwire", "register_comm_hook"),
    "attach": ("gradwire", "attach"),
    "pytorch-hook": ("pytorch", "register_comm_hook"),
    "pytorch-attach": ("pytorch", "attach"),
    "pytorch-run": ("pytorch", "run"),
}

SHAPES = {"first": (6, 5), "second": (9, 4), "third": (40,), "fourth": (4, 3)}
NAMES = (*SHAPES, "words.weight")
LATE = ("first", "second", "fourth")  # the delayed parameters
EPOCH = 20  # numbers of forwards from one epoch to the next
FAILED = 19  # number of the forward of the step that fails


class Net(nn.Module):
    """The loss is the sum of parameters times inputs; `seen` sums an input in training."""

    def __init__(self, features):
        super().__init__()
        self.third = nn.Parameter(torch.ones(SHAPES["third"]))  # in a bucket of its own, as the last one
        for name in ("first", "second", "fourth"):
            self.register_parameter(name, nn.Parameter(torch.ones(SHAPES[name])))
        self.words = nn.Embedding(7, 4, sparse=SPARSE in features)
        self.words.weight.data.fill_(1)
        self.second.requires_grad_(FROZEN not in features)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs, words, use):
        if self.training:
            self.seen += inputs["third"][:2].float().abs()
        parts = [(getattr(self, name) * inputs[name]).sum() for name in use if name in inputs]
        return sum(parts) + (12 * self.words(words)).sum() if "words.weight" in use else sum(parts)


def inputs_of(rank, number):
    """The inputs of a rank's forward of that number."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    inputs = {name: 12.0 * torch.randint(-2, 3, shape, generator=generator) for name, shape in SHAPES.items()}
    return inputs, torch.randint(7, (3,), generator=generator)


class Plan:
    """A training loop with some features, as every rank knows it.

    With `join`, ranks have different numbers of inputs, rank 0 none in one epoch. With ``no_sync``, too, it ends within
    an accumulation.
    """

    def __init__(self, features, size):
        self.features, self.size = features, size
        self.joins = JOIN in features or JOIN_REST in features
        self.per_step = 2 if NO_SYNC in features else 1
        steps = [[1, 3, 2], [0, 2, 1]] if self.joins else [[4, 4, 4]]
        if sum(map(len, features)) % 2:
            steps.reverse()
        self.epochs = [[self.per_step * n for n in each[:size]] for each in steps]
        for each in self.epochs:
            each[0] = max(0, each[0] - self.joins * (self.per_step - 1))
        # The forward before which a step fails: the first one with all ranks in `join`, else that of the third step.
        epoch = next(epoch for epoch, each in enumerate(self.epochs) if all(each))
        self.fails_at = (EPOCH * epoch if self.joins else 2 * self.per_step) if ERROR in features else None

    def numbers(self, rank, epoch):
        """The numbers of a rank's forwards."""
        return range(EPOCH * epoch, EPOCH * epoch + self.epochs[epoch][rank])

    def live(self, number):
        """The ranks that have this forward."""
        return [rank for rank in range(self.size) if number in self.numbers(rank, number // EPOCH)]

    def is_synchronized(self, number):
        return number % self.per_step == self.per_step - 1

    def use(self, rank, number):
        """The names of the parameters in a forward."""
        step = number // self.per_step
        left_out = ()
        if STATIC in self.features:
            left_out = ("third",)
        elif SKIP in self.features:
            left_out = () if step % 2 else ("third",)
        elif UNUSED in self.features:
            left_out = ("third",) if step == 2 else ("first", "third") if (step + rank) % 2 else ("words.weight",)
        return [name for name in NAMES if name not in left_out]

    def mean(self, number):
        """The mean gradients of the step that ends with this forward; None where no rank has one."""
        sums, live = dict.fromkeys(NAMES), self.live(number)
        for rank in live:
            for k in range(number - self.per_step + 1, number + 1):
                inputs, words = inputs_of(rank, k)
                inputs["words.weight"] = torch.zeros(7, 4).index_add_(0, words, torch.full((3, 4), 12.0))
                for name in self.use(rank, k):
                    sums[name] = inputs[name] + (0 if sums[name] is None else sums[name])
        divisor = len(live) if JOIN_REST in self.features else self.size
        return {name: None if each is None else each / divisor for name, each in sums.items()}


def sum_now(group, buffers):
    for buffer in buffers.values():
        dist.all_reduce(buffer, group=group)


def sum_later(group, buffers):
    return [dist.all_reduce(buffer, group=group, async_op=True).get_future() for buffer in buffers.values()]


class Buffers:
    """The buffer `seen` of every rank, computed without DDP."""

    def __init__(self, plan):
        self.plan, self.seen, self.is_due = plan, [torch.zeros(2)] * plan.size, True

    def step(self, number):
        if number == self.plan.fails_at:
            self.forward(FAILED)
            self.seen, self.is_due = [self.seen[0]] * self.plan.size, True
        if EVALUATION in self.plan.features and not self.plan.joins:
            self.forward(number, is_training=False)
            self.is_due = False
        self.forward(number)
        self.is_due = self.plan.is_synchronized(number)

    def forward(self, number, is_training=True):
        plan = self.plan
        live = plan.live(number) if number != FAILED else list(range(plan.size))
        if self.is_due and AFTER not in plan.features:
            source = self.seen[max(live) if plan.joins else 0]
            self.seen = [sum(self.seen) if BEFORE in plan.features else source] * plan.size
        for rank in live if is_training else ():
            self.seen[rank] = self.seen[rank] + inputs_of(rank, number)[0]["third"][:2].abs()
        if self.is_due and AFTER in plan.features:
            self.seen = [sum(self.seen)] * plan.size

    def end_epoch(self, epoch):
        if self.plan.joins:  # all take those of the last rank
            lengths = self.plan.epochs[epoch]
            self.seen = [self.seen[max(rank for rank, n in enumerate(lengths) if n == max(lengths))]] * self.plan.size


class Run:
    """A plan on this rank."""

    def __init__(self, plan, setting, hook, stack):
        wrapper, self.way = SETTINGS[setting]
        self.is_exact, self.keeps_errors = self.way is None, hook in FEEDBACK
        self.plan, self.rank, features = plan, dist.get_rank(), plan.features
        module = Net(features)
        options = {"bucket_cap_mb": CAP}
        for feature in features:
            options |= FEATURES[feature]
        if DELAYED in features:
            options["delay_all_reduce_named_params"] = [(name, module.get_parameter(name)) for name in LATE]
            options["param_to_hook_all_reduce"] = module.third
        if OPTIMIZER in features:
            trained = [p for p in module.parameters() if p.requires_grad]
            _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 1.0})
        made = stack.enter_context(compressed(hook)) if self.way == "run" else []
        ddp, self.state = WRAPPERS[wrapper](module, **options), None
        if self.way == "run":
            self.state = made[0]._state
        elif self.way is not None:
            self.state, function = HOOKS[hook](None)
            if self.way == "attach":
                gradwire.attach(ddp, self.state, function)
            else:
                register(ddp, (self.state, function))
        if BEFORE in features:
            ddp._register_buffer_comm_hook(None, sum_now, LOCATIONS.PRE_FORWARD)
        if AFTER in features:
            ddp._register_buffer_comm_hook(None, sum_later, LOCATIONS.POST_FORWARD)
        if MANUAL in features:
            ddp.require_manual_backward_finalization = True
        if COPY in features:
            ddp = copy.deepcopy(ddp)
            self.state = ddp.reducer.hook.state
        self.ddp = ddp
        self.trained = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}

    def forward(self, number):
        inputs, words = inputs_of(self.rank, number)
        return self.ddp(inputs, words, self.plan.use(self.rank, number))

    def train(self):
        """The reduced gradients and the buffer after each synchronized step of this rank."""
        plan, seen = self.plan, {}
        for epoch in range(len(plan.epochs)):
            with self.ddp.join(divide_by_initial_world_size=JOIN in plan.features) if plan.joins else nullcontext():
                for number in plan.numbers(self.rank, epoch):
                    if number == plan.fails_at:
                        self.fail()
                    if number % plan.per_step == 0:
                        self.ddp.zero_grad()
                    if EVALUATION in plan.features:
                        self.ddp.eval()
                        with torch.no_grad():
                            self.forward(number)
                        self.ddp.train()
                    before = {name: p.detach().clone() for name, p in self.trained.items()}
                    with nullcontext() if plan.is_synchronized(number) else self.ddp.no_sync():
                        self.forward(number).backward()
                    if plan.is_synchronized(number):
                        if MANUAL in plan.features:
                            self.ddp.finalize_backward()
                        seen[number] = self.reduced(before), self.ddp.module.seen.clone()
        return seen

    def fail(self):
        """A step that fails on the last rank, over NCCL on all; then all take the model of rank 0."""
        self.ddp.zero_grad()
        fails = self.rank == self.plan.size - 1 or dist.get_backend() != "gloo"
        with failing_hook(self.ddp, 0 if fails else None):
            loss = self.forward(FAILED)
            error = error_of(lambda: (loss.backward(), MANUAL in self.plan.features and self.ddp.finalize_backward()))
        assert error is not None, "the step has not failed"
        self.ddp.resynchronize(from_rank=0)

    def reduced(self, before):
        """The gradients of this step, which is applied."""
        parameters = [*self.ddp.module.parameters()]
        assert all(p.dtype == torch.float32 for p in parameters), "parameters have low precision"
        assert all(p.grad is None for p in parameters if not p.requires_grad), "a frozen parameter has a gradient"
        if OPTIMIZER in self.plan.features:
            assert all(p.grad is None for p in self.trained.values()), "gradients are left"
            return {name: before[name] - p.detach() for name, p in self.trained.items()}
        found = {name: None if p.grad is None else p.grad.to_dense().clone() for name, p in self.trained.items()}
        with torch.no_grad():
            for p in self.trained.values():
                if p.grad is not None:
                    p.sub_(p.grad)
        return found

    def problems(self, seen):
        """What is wrong with the results. A collective call."""
        plan, problems, buffers = self.plan, [], Buffers(self.plan)
        state = self.ddp.module.state_dict()
        if not plan.joins:
            del state["seen"]
        # Arrays: tensors take long to pickle.
        gathered = from_all_ranks(tree_map_only(torch.Tensor, lambda tensor: tensor.numpy(force=True), (seen, state)))
        gathered = tree_map_only(ndarray, torch.as_tensor, gathered)
        everyones, (model, *_) = zip(*gathered, strict=True)
        problems += [f"models differ at the end: {line}" for line in differences(state, model)]
        lost, n_comparable = {name: torch.zeros_like(p) for name, p in self.trained.items()}, 0
        for number in (number for epoch in range(len(plan.epochs)) for number in self.all_numbers(epoch)):
            buffers.step(number)
            if number in seen or plan.is_synchronized(number):
                is_first = number - plan.per_step + 1 == plan.fails_at
                n_comparable = (0 if is_first else n_comparable) + (len(plan.live(number)) == plan.size)
                results = {rank: each[number] for rank, each in enumerate(everyones) if number in each}
                problems += self.problems_of_step(number, results, buffers, lost)
            if number == self.all_numbers(number // EPOCH)[-1]:
                buffers.end_epoch(number // EPOCH)
        if DRIFT in plan.features and self.ddp.reducer.drift._n_backwards != n_comparable:
            problems.append(f"{self.ddp.reducer.drift._n_backwards} of {n_comparable} backwards count for check_every")
        if self.keeps_errors and not self.is_exact and not {JOIN_REST, ERROR}.intersection(plan.features):
            for name, error in errors_of(self.state.state_dict()).items():
                lost[name] -= error.to(lost[name].device)
            problems += [f"lost of {name}: {each}" for name, each in lost.items() if each.abs().max() > 1e-3]
        return problems

    def all_numbers(self, epoch):
        return range(EPOCH * epoch, EPOCH * epoch + max(self.plan.epochs[epoch]))

    def problems_of_step(self, number, results, buffers, lost):
        """What is wrong with a step's ``results`` by rank; adds what is missing in them to ``lost``."""
        plan, lines = self.plan, []
        mean = {name: each for name, each in plan.mean(number).items() if name in self.trained}
        if sorted(results) != plan.live(number):
            return [f"step {number}: results of ranks {sorted(results)}"]
        for name in self.trained if OPTIMIZER in plan.features else LATE if DELAYED in plan.features else ():
            if name in mean and mean[name] is None:
                mean[name] = torch.zeros_like(self.trained[name])
        first, _ = results[min(results)]
        for rank, (found, buffer) in results.items():
            lines += differences(found, mean if self.is_exact else first)
            lines += differences(buffer, buffers.seen[rank])
        for name, each in mean.items():
            if each is not None:
                lost[name] += each - first[name]
            elif first[name] is not None:
                lines.append(f"{name} has a gradient")
        return [f"step {number}: {line}" for line in lines]


def train_with(features, setting, hook="int4"):
    """What is wrong with a training on this rank."""
    with ExitStack() as stack:
        if MIXED in features and not torch.accelerator.is_available():
            stack.enter_context(no_streams())
        torch.manual_seed(0)
        run = Run(Plan(features, dist.get_world_size()), setting, hook, stack)
        return run.problems(run.train())


def all_problems(cases):
    """What is wrong with each of the trainings, which are given as arguments of `train_with`."""
    found = {}
    for case in cases:
        try:
            found[case] = train_with(*case)
        except Exception as error:
            raise RuntimeError(f"{case}: {error}") from error
    return found


def outcomes(pairs, refused, setting):
    """By pair: what is wrong with the training of a pair that is not refused, or the error of one that is."""
    found = {}
    for pair, is_refused in zip(pairs, refused, strict=True):
        try:
            found[pair] = train_with(pair, setting)
        except Exception as error:
            if not is_refused and not SHARED_GPU:
                raise RuntimeError(f"{' and '.join(pair)}: {error}") from error
            found[pair] = f"{type(error).__name__}: {error}"
    return found


def is_possible(features, setting, errors):
    """Whether the features go together on this class; ``errors`` has the refused pairs."""
    wrapper, way = SETTINGS[setting]
    used = {*features} | ({HOOK} if way is not None else set())
    excluded = [*ALTERNATIVES, *errors, *(NOT_ON_PYTORCH if wrapper == "pytorch" else ())]
    return not any(together <= used for together in excluded)


def refused_pairs():
    """The errors in the page's table of refused pairs."""
    _, _, table = PAGE.read_text().partition("| refused pair | error |\n")
    rows = re.findall(r"^\| (.+) \+ (.+) \| `(.+)` \|$", table.partition("\n\n")[0], re.MULTILINE)
    return {frozenset((first, second)): error for first, second, error in rows}


def test_page_lists_the_features_and_refuses_pairs_of_them():
    (items,) = re.findall(r"every pair of these features:\n\n(.+?)\n\n", PAGE.read_text(), re.DOTALL)
    listed = [name for item in items.split("\n- ") for name in " ".join(item.partition(": ")[2].split()).split(", ")]
    assert sorted(listed) == sorted(FEATURES)
    refused = refused_pairs()
    assert refused and all(pair <= {*FEATURES, HOOK} for pair in refused)


@pytest.mark.parametrize(
    ("setting", "size"),
    [
        ("none", 3),
        ("attach", 2),
        ("pytorch-run", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("none", 2), ("attach", 3), ("pytorch-run", 3)]),
        *(
            pytest.param(setting, size, marks=pytest.mark.slow)
            for setting in ("hook", "pytorch-attach")
            for size in (2, 3)
        ),
    ],
)
def test_pair_of_features_trains_exactly_or_is_refused_on_every_rank(worlds, setting, size):
    wrapper, way = SETTINGS[setting]
    errors = refused_pairs()
    pairs = PAIRS
    if way is not None:  # features that no hook goes with are tested alone
        alone = {feature for feature in FEATURES if frozenset((feature, HOOK)) in errors}
        pairs = [pair for pair in PAIRS if not alone.intersection(pair)] + [(feature,) for feature in sorted(alone)]
    if wrapper == "pytorch":
        pairs = [pair for pair in pairs if not any(without <= set(pair) for without in NOT_ON_PYTORCH)]
    expected = [errors.get(frozenset(pair if len(pair) == 2 else (*pair, HOOK))) for pair in pairs]
    refused = [error is not None for error in expected]
    first, *others = worlds(size).run(outcomes, pairs=pairs, refused=refused, setting=setting)
    for pair, error in zip(pairs, expected, strict=True):
        assert error in first[pair] if error else not first[pair], (pair, first[pair], error)
    assert all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_any_features_train_exactly_together_under_any_hook(worlds, seed, size):
    drawn, errors, cases = random.Random(1000 * seed + size), refused_pairs(), []
    while len(cases) < 40:
        setting = drawn.choice(["none", "hook", "hook", "attach", "pytorch-hook"])
        hook = drawn.choice(sorted(HOOKS.keys() - {"fp16_of_pytorch"}))  # which leaves the group stuck after an error
        features = tuple(drawn.sample([*FEATURES], drawn.randint(2, 6)))
        if is_possible(features, setting, errors):
            cases.append((features, setting, hook))
    for found in worlds(size).run(all_problems, cases=cases):
        assert not {case: lines for case, lines in found.items() if lines}
