"""`PowerSGDState`: options, `repr`, statistics and memory, next to PyTorch's state."""

import copy
import inspect
import logging
import re
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorchs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import LowRankBucket, LowRankPolicy, Step, flat_low_rank_bucket
from gradwire.compress.policy import MatrixShape
from gradwire.compress.powersgd import alternating_all_reduce, powersgd_all_reduce
from gradwire.hooks import powerSGD_hook as ours
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.support.bits import assert_same_bits
from tests.support.powersgd_checkpoints import EARLY, own_memory, trained
from tests.support.ranks import on_ranks
from tests.support.training import SMALL, SMALLEST, WRAPPERS, own_batches, register, train_steps, wrapped

# --- options


def test_state_signature_begins_like_pytorchs():
    theirs = list(inspect.signature(pytorchs.PowerSGDState).parameters.values())
    mine = list(inspect.signature(PowerSGDState).parameters.values())
    first, further = mine[: len(theirs)], mine[len(theirs) :]
    assert [(p.name, p.kind, p.default) for p in first] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in further)


@pytest.mark.parametrize("name", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_hooks_have_pytorchs_signature(name):
    theirs, mine = (inspect.signature(getattr(module, name)) for module in (pytorchs, ours))
    assert list(theirs.parameters) == list(mine.parameters)
    assert theirs.return_annotation == mine.return_annotation


def test_options_and_counters_are_attributes_like_pytorchs():
    arguments = (None, 3, 20, 1.5, False, False, 1e-8, 7, 0, True)
    theirs, mine = pytorchs.PowerSGDState(*arguments), PowerSGDState(*arguments)
    private = {"rng", "error_dict", "p_memory_dict", "q_memory_dict"}
    for name in set(pytorchs.PowerSGDState.__slots__) - private:
        assert getattr(mine, name) == getattr(theirs, name), name


@pytest.mark.parametrize("start", [-1, 0, 1, 2])
@pytest.mark.parametrize("warm_start", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("feedback", [False, True], ids=["forgets", "remembers"])
def test_early_start_raises_like_pytorch(start, warm_start, feedback):
    messages = []
    for module in (pytorchs, ours):
        try:
            module.PowerSGDState(None, 1, start, use_error_feedback=feedback, warm_start=warm_start)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) in (0, 2)
    assert (len(messages) == 2) == (start < 2 and (warm_start or feedback))
    if messages:
        common = "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
        assert all(message.startswith(common) for message in messages)
        assert messages[1].endswith(f"got {start}.")


def test_alternating_without_warm_start_raises():
    with pytest.raises(ValueError, match="alternating needs warm_start"):
        PowerSGDState(None, alternating=True, warm_start=False)


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_precision_reaches_matrix_tables(precision):
    options = PowerSGDState(None, precision=precision).options.bucket_options(iteration=1000)
    gradient = torch.zeros(80, 80)
    bucket = LowRankBucket([gradient], [MatrixShape(1, 80, 80, 16)], **options)
    assert bucket.table.precision == precision
    flat = flat_low_rank_bucket([gradient], 16, names=["a"], memory={}, **options)
    assert flat.table.precision == precision


def test_option_dictionaries_are_copied():
    ranks, stacks = {"a": 1}, {"b": 2}
    state = PowerSGDState(None, ranks=ranks, stacks=stacks)
    ranks["c"], stacks["d"] = 3, 4
    assert (state.ranks, state.stacks) == ({"a": 1}, {"b": 2})


def test_assigned_option_applies_to_policy_and_settings():
    state = PowerSGDState(None, ranks={"a": 1})
    before = state._settings()
    state.matrix_approximation_rank = 5
    state.ranks["b"] = 3
    assert state.options.policy.rank == state.options.matrix_approximation_rank == 5
    assert state.options.policy.ranks == {"a": 1, "b": 3}
    assert state._settings() == before | {"matrix_approximation_rank": 5, "ranks": {"a": 1, "b": 3}}


@pytest.mark.parametrize(("name", "value"), [("matrix_approximation_rank", 0), ("warm_start", 1), ("ranks", {"a": -1})])
def test_assigned_option_out_of_range_raises_and_changes_nothing(name, value):
    state = PowerSGDState(None)
    before = state._settings()
    with pytest.raises(ValueError, match=name):
        setattr(state, name, value)
    assert state._settings() == before


def test_unknown_attribute_raises():
    with pytest.raises(AttributeError, match="'PowerSGDState' object has no attribute 'rank'"):
        _ = PowerSGDState(None).rank


def test_repr_shows_step_and_options():
    state = PowerSGDState(None, 4, ranks={"head.*": 8})
    state.iter = 120
    shown = repr(state)
    assert shown.startswith("PowerSGDState(iter=120, matrix_approximation_rank=4, start_powerSGD_iter=1000, ")
    assert "ranks={'head.*': 8}" in shown


class AssignsTooEarly(PowerSGDState):
    def __init__(self):
        self.ranks = {}
        super().__init__(None)


def test_option_assigned_before_the_constructor_raises_with_the_remedy():
    with pytest.raises(AttributeError, match=r"^ranks is an option: pass it to super\(\).__init__\(\)"):
        AssignsTooEarly()


# --- statistics


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "transformer", "frozen"])
@on_ranks(1, 2)
def test_statistics_after_every_step_equal_pytorchs(model, rank):
    options = {"start_powerSGD_iter": 2, "min_compression_rate": (1, 1.25)[dist.get_world_size() - 1]}
    seen = []
    for module, wrapper in ((pytorchs, "pytorch"), (ours, "pytorch"), (ours, "gradwire")):
        state = module.PowerSGDState(None, rank, **options)
        ddp = wrapped(wrapper, model, hook=(state, module.powerSGD_hook), bucket_cap_mb=25)  # one bucket
        generator = own_batches()
        seen.append([(train_steps(ddp, 1, generator), state.compression_stats(), state.iter)[1:] for _ in range(5)])
    theirs, *ours_seen = seen
    assert ours_seen == [theirs] * 2
    assert [iteration for _, iteration in theirs] == [1, 2, 3, 4, 5]
    assert theirs[-1][0][0] >= 1


@pytest.mark.parametrize(
    ("frequency", "expected"), [(1, [3, 4, 5, 6, 7, 8]), (2, [3, 5, 7]), (100, [3]), (0, [3, 4, 5, 6, 7, 8])]
)
@on_ranks(1)
def test_statistics_are_logged_at_given_frequency(frequency, expected):
    messages = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger(ours.__name__).addHandler(handler)
    logging.getLogger(ours.__name__).setLevel(logging.INFO)
    try:
        trained("gradwire", options={"compression_stats_logging_frequency": frequency}, steps=8, bucket_cap_mb=SMALL)
    finally:
        logging.getLogger(ours.__name__).removeHandler(handler)
    assert (
        [int(found[1]) for message in messages if (found := re.match(r"Compression after (\d+) steps: rate", message))]
    ) == expected


@on_ranks(1)
def test_statistics_of_alternating_count_side_sent():
    state = PowerSGDState(None, alternating=True, **EARLY)
    ddp, sent = wrapped(hook=(state, powerSGD_hook), bucket_cap_mb=SMALLEST), []
    for _ in range(6):
        train_steps(ddp)
        sent.append(state.total_numel_after_compression)
    shapes = [tuple(parameter.shape) for parameter in ddp.parameters()]
    raw = sum(shape[0] for shape in shapes if len(shape) == 1)
    rows, columns = (sum(shape[side] for shape in shapes if len(shape) == 2) for side in (0, 1))
    assert [after - before for before, after in pairwise(sent)][1:] == [raw + rows, raw + columns] * 2


# --- memory


@pytest.mark.parametrize(
    ("hook", "model"),
    [
        *(("powerSGD_hook", name) for name in ("mlp", "transformer", "conv", "complex", "mixed", "brain", "half")),
        ("powerSGD_hook", "frozen"),
        ("batched_powerSGD_hook", "mlp"),
    ],
)
@pytest.mark.parametrize("feedback", [True, False], ids=["remembers", "forgets"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(1)
def test_error_memory_has_size_of_compressed_gradients_in_fp32(wrapper, hook, model, feedback):
    # In fp64 for fp64 gradients. The batched hook compresses all gradients.
    state = PowerSGDState(None, use_error_feedback=feedback, **EARLY)
    ddp, held = wrapped(wrapper, model, hook=(state, getattr(ours, hook))), []
    for _ in range(5):
        train_steps(ddp)
        held.append(state.error_memory_bytes)
    compressed, everything = 0, 0
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad:
            real = parameter.numel() * (2 if parameter.is_complex() else 1)
            nbytes = real * (8 if parameter.dtype == torch.float64 else 4)
            everything += nbytes
            compressed += nbytes if state.options.policy.matrix_shape(name, parameter) is not None else 0
    assert 0 < compressed < everything
    expected = feedback * (compressed if hook == "powerSGD_hook" else everything)
    assert held == [0, 0] + [expected] * 3
    storages = [error.untyped_storage() for error in own_memory(state)["errors"].values()]
    assert sum({each._cdata: each.nbytes() for each in storages}.values()) == expected, "what the tensors hold in fact"


@pytest.mark.parametrize("alternating", [False, True], ids=["both", "alternating"])
def test_bucket_continues_from_memory_and_does_not_modify_it(alternating):
    gradients = [torch.randn(24, 16, generator=torch.Generator().manual_seed(0)), torch.ones(24)]
    shapes = LowRankPolicy(rank=2).matrix_shapes(gradients)
    transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))

    def step(bucket, iteration):
        results = [torch.empty_like(gradient) for gradient in gradients]
        algorithm = alternating_all_reduce if alternating else powersgd_all_reduce
        run_algorithm(algorithm(Step.of(bucket, gradients, results, iteration, transport, workspace)), transport)
        return results

    first = LowRankBucket(gradients, shapes, names=["w", "b"], alternating=alternating)
    step(first, 0)
    memory = copy.deepcopy(first.memory)
    expected = step(first, 1)
    known = {entry: dict(tensors) for entry, tensors in memory.items()}
    second = LowRankBucket(gradients, shapes, names=["w", "b"], memory=memory, alternating=alternating)
    assert memory == known
    # Updated in place by the next step, as the state expects.
    assert second.memory["errors"]["w"] is memory["errors"]["w"]
    assert second.memory["q"]["w"] is not memory["q"]["w"]
    assert_same_bits(step(second, 1), expected)


@pytest.mark.parametrize("shape", [(16, 24), (384,), (24, 17), (2, 12, 16)], ids=str)
@pytest.mark.parametrize("is_flat", [False, True], ids=["matrices", "flat"])
def test_bucket_rejects_an_error_of_another_shape(is_flat, shape):
    gradients, memory = [torch.ones(24, 16)], {"errors": {"w": torch.zeros(shape)}}
    with pytest.raises(ValueError, match=re.escape(f"error memory of w has shape {shape}, its gradient (24, 16)")):
        if is_flat:
            flat_low_rank_bucket(gradients, 1, names=["w"], memory=memory)
        else:
            LowRankBucket(gradients, LowRankPolicy().matrix_shapes(gradients), names=["w"], memory=memory)


class Allocations(TorchDispatchMode):
    """Notes the bytes of every storage that an operation makes, and keeps it, so that no other takes its place."""

    def __init__(self):
        super().__init__()
        self.nbytes = []
        self._kept = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._kept:
                    self._kept[storage._cdata] = storage
                    self.nbytes.append(storage.nbytes())
        return result


@pytest.mark.parametrize("kind", ["warm", "cold", "alternating"])
@pytest.mark.parametrize("feedback", [True, False], ids=["remembers", "forgets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_allocates_no_tensor_of_gradient_size(dtype, feedback, kind):
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(shape, generator=generator).to(dtype) for shape in ((1024, 1024), (2048, 512), (1000,))]
    shapes = [MatrixShape(1, 1024, 1024, 4), MatrixShape(2, 1024, 512, 4), None]
    alternating = kind == "alternating"
    bucket = LowRankBucket(sources, shapes, error_feedback=feedback, alternating=alternating)
    transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
    with Allocations() as allocations:
        for i in range(4):
            if i == 2:
                allocations.nbytes = []
            if alternating:
                steps = alternating_all_reduce(Step.of(bucket, sources, sources, i, transport, workspace))
            else:
                step = Step.of(bucket, sources, sources, i, transport, workspace)
                steps = powersgd_all_reduce(step, warm_start=kind == "warm")
            run_algorithm(steps, transport)
    # All P of the bucket together, in fp64, are 3 * 4 * 1024 * 8 bytes: 1/21 of a matrix in 16 bit.
    assert allocations.nbytes, "the factors' small tensors are seen"
    assert max(allocations.nbytes) <= sources[0].nbytes / 20


# --- nothing to compress


class Adapters(nn.Module):
    """Low-rank adapters of a frozen matrix."""

    def __init__(self, rank=4, width=640):
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return (self.frozen(x) + self.lora_b(self.lora_a(x))).square().mean()


class Summed(nn.Module):
    """The sum of what a module returns."""

    def __init__(self, module):
        super().__init__()
        self.inner = module

    def forward(self, x):
        return self.inner(x).sum()


def warned(model, inputs, hook=powerSGD_hook, wrapper="gradwire", steps=5, **options):
    """After which steps there was a warning, and its message."""
    state = PowerSGDState(None, start_powerSGD_iter=2, **options)
    ddp = WRAPPERS[wrapper](model)
    state.bind(model)
    register(ddp, (state, hook))
    found = []
    for i in range(steps):
        ddp.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp(inputs).backward()
        found += [(i + 1, str(each.message)) for each in caught if "PowerSGD" in str(each.message)]
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"matrix_approximation_rank": 4},
            "4 x 640 elements; its factors of rank 4 have 2,576, a rate of 0.99. "
            "Lower matrix_approximation_rank: rank 1 has 3.98.",
        ),
        (
            {"matrix_approximation_rank": 2, "min_compression_rate": 2},
            "4 x 640 elements; its factors of rank 2 have 1,288, a rate of 1.99. min_compression_rate=2 asks for a "
            "higher one: lower it, or matrix_approximation_rank: rank 1 has 3.98.",
        ),
        (
            {"matrix_approximation_rank": 1, "min_compression_rate": 5},
            "4 x 640 elements; its factors of rank 1 have 644, a rate of 3.98. min_compression_rate=5 asks for a "
            "higher one: lower it.",
        ),
        (
            {"matrix_approximation_rank": 4, "min_compression_rate": 5},
            "4 x 640 elements; its factors of rank 4 have 2,576, a rate of 0.99. Lower matrix_approximation_rank and "
            "min_compression_rate: rank 1 has 3.98.",
        ),
        ({"ranks": {"*": 0}}, "ranks exempts every matrix."),
    ],
    ids=["rank", "rate or rank", "rate", "rate and rank", "exempt"],
)
def test_powersgd_that_compresses_no_adapter_warns_once_with_reason(world_of_one, wrapper, options, reason):
    ((when, message),) = warned(Adapters(), torch.ones(2, 640), wrapper=wrapper, **options)
    assert when == 3, "the first compressed step"
    assert message.startswith("PowerSGD compresses nothing here: it sends all 5,120 elements. ")
    assert reason in message
    if "rank 4" in reason:
        assert "The largest matrix, lora_" in message


@pytest.mark.parametrize(
    ("model", "width", "options", "text"),
    [
        (Summed(nn.LayerNorm(8)), 8, {}, "No parameter is a matrix"),
        (Summed(nn.Linear(2, 2)), 2, {}, "too small for any rank"),
        (
            Adapters(),
            640,
            {"hook": batched_powerSGD_hook, "matrix_approximation_rank": 64},
            "No bucket is large enough",
        ),
    ],
    ids=["vectors", "tiny matrix", "batched"],
)
def test_powersgd_on_a_model_too_small_for_it_warns_with_the_reason(world_of_one, model, width, options, text):
    ((_, message),) = warned(model, torch.ones(2, width), **options)
    assert text in message


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_powersgd_that_compresses_does_not_warn(world_of_one, hook):
    assert warned(Adapters(), torch.ones(2, 640), hook=hook, matrix_approximation_rank=1) == []
