"""`PowerSGDState`: options, `repr` and statistics, next to PyTorch's state."""

import inspect
import logging
import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorchs

from gradwire.compress import LowRankBucket, flat_low_rank_bucket
from gradwire.compress.policy import MatrixShape
from gradwire.hooks import powerSGD_hook as ours
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from tests.support.powersgd_checkpoints import EARLY, trained
from tests.support.training import SMALL, SMALLEST, WRAPPERS, build, register

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matrix_approximation_rank": 0}, "rank is 0; expected at least 1"),
        ({"matrix_approximation_rank": -2}, "rank is -2; expected at least 1"),
        ({"ranks": {"head.*": -1}}, r"ranks\['head\.\*'\] is -1; expected a rank, or 0"),
        ({"ranks": {"head.*": 1.5}}, r"ranks\['head\.\*'\] is 1\.5; expected a rank, or 0"),
        ({"stacks": {"*.qkv": 0}}, r"stacks\['\*\.qkv'\] is 0; expected a number of matrices"),
        ({"factor_dtype": torch.float16}, r"factor_dtype is torch\.float16; expected None, torch\.float32 or"),
        ({"factor_dtype": torch.int8}, r"factor_dtype is torch\.int8; expected None, torch\.float32 or"),
        ({"factor_dtype": "bf16"}, r"factor_dtype is bf16; expected None, torch\.float32 or"),
        ({"alternating": True, "warm_start": False}, "alternating needs warm_start"),
    ],
    ids=str,
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        PowerSGDState(None, **options)


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_precision_reaches_matrix_tables(precision):
    options = PowerSGDState(None, precision=precision).options.of_buckets(iteration=1000)
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
    before = state.settings()
    state.matrix_approximation_rank = 5
    state.ranks["b"] = 3
    assert state.options.policy.rank == state.options.matrix_approximation_rank == 5
    assert state.options.policy.ranks == {"a": 1, "b": 3}
    assert state.settings() == before | {"matrix_approximation_rank": 5, "ranks": {"a": 1, "b": 3}}


@pytest.mark.parametrize(("name", "value"), [("matrix_approximation_rank", 0), ("warm_start", 1), ("ranks", {"a": -1})])
def test_assigned_option_out_of_range_raises_and_changes_nothing(name, value):
    state = PowerSGDState(None)
    before = state.settings()
    with pytest.raises(ValueError, match=name):
        setattr(state, name, value)
    assert state.settings() == before


def test_unknown_attribute_raises():
    with pytest.raises(AttributeError, match="'PowerSGDState' object has no attribute 'rank'"):
        _ = PowerSGDState(None).rank


def test_repr_shows_step_and_options():
    state = PowerSGDState(None, 4, ranks={"head.*": 8})
    state.iter = 120
    shown = repr(state)
    assert shown.startswith("PowerSGDState(iter=120, matrix_approximation_rank=4, start_powerSGD_iter=1000, ")
    assert "ranks={'head.*': 8}" in shown


# --- statistics


def statistics(library, model, steps=5, wrapper="pytorch", **options):
    """compression_stats and iter after every step; all parameters in one bucket."""
    module = {"ours": ours, "pytorchs": pytorchs}[library]
    state = module.PowerSGDState(None, **options)
    net = build(model)
    ddp = WRAPPERS[wrapper](net)
    register(ddp, (state, module.powerSGD_hook))
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(*net.batch(generator)).backward()
        seen.append((state.compression_stats(), state.iter))
    return seen


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "transformer", "frozen"])
def test_statistics_equal_pytorchs(worlds, model, rank):
    for size, rate in ((1, 1), (2, 1.25)):
        options = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2, "min_compression_rate": rate}
        case = {"model": model, **options}
        theirs = worlds(size).run(statistics, library="pytorchs", **case)
        assert worlds(size).run(statistics, library="ours", **case) == theirs
        assert worlds(size).run(statistics, library="ours", wrapper="gradwire", **case) == theirs
        assert [iteration for _, iteration in theirs[0]] == [1, 2, 3, 4, 5]
    assert theirs[0][-1][0][0] >= 1


def reports(frequency, steps):
    """After which steps the statistics were logged."""
    messages = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger(ours.__name__).addHandler(handler)
    logging.getLogger(ours.__name__).setLevel(logging.INFO)
    try:
        trained(
            "gradwire", options={"compression_stats_logging_frequency": frequency}, steps=steps, bucket_cap_mb=SMALL
        )
    finally:
        logging.getLogger(ours.__name__).removeHandler(handler)
    return [
        int(found[1]) for message in messages if (found := re.match(r"Compression after (\d+) steps: rate", message))
    ]


@pytest.mark.parametrize(
    ("frequency", "expected"), [(1, [3, 4, 5, 6, 7, 8]), (2, [3, 5, 7]), (100, [3]), (0, [3, 4, 5, 6, 7, 8])]
)
def test_statistics_are_logged_at_given_frequency(worlds, frequency, expected):
    assert worlds(1).run(reports, frequency=frequency, steps=8) == [expected]


def alternating_statistics(wrapper):
    net = build("mlp")
    state = PowerSGDState(None, alternating=True, **EARLY)
    ddp = WRAPPERS[wrapper](net, bucket_cap_mb=SMALLEST)
    register(ddp, (state, powerSGD_hook))
    sent = []
    for _ in range(6):
        ddp.zero_grad()
        ddp(*net.batch(torch.Generator())).backward()
        sent.append(state.total_numel_after_compression)
    shapes = [tuple(parameter.shape) for parameter in net.parameters()]
    return [after - before for before, after in pairwise(sent)][1:], shapes


def test_statistics_of_alternating_count_side_sent(worlds):
    for sent, shapes in worlds(1).run(alternating_statistics, wrapper="gradwire"):
        raw = sum(shape[0] for shape in shapes if len(shape) == 1)
        rows, columns = (sum(shape[side] for shape in shapes if len(shape) == 2) for side in (0, 1))
        assert sent == [raw + rows, raw + columns] * 2


class AssignsTooEarly(PowerSGDState):
    def __init__(self):
        self.ranks = {}
        super().__init__(None)


def test_option_assigned_before_the_constructor_raises_and_says_what_to_do():
    with pytest.raises(AttributeError, match=r"^ranks is an option: pass it to super\(\).__init__\(\)"):
        AssignsTooEarly()
