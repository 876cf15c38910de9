"""`PowerSGDState`: its options, its statistics, its memory, and what a checkpoint of it keeps."""

import copy
import gc
import inspect
import io
import logging
import pickle
import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bits import assert_same_bits, assert_same_on_all_ranks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorchs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import SMALL, SMALLEST, WRAPPERS, build, gradients, register, train
from zoo import Probe

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import LowRankBucket
from gradwire.compress.policy import MatrixShape
from gradwire.compress.powersgd import alternating_all_reduce, powersgd_all_reduce
from gradwire.hooks import powerSGD_hook as ours
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

# Half an ulp.
U = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
EARLY = {"start_powerSGD_iter": 2, "min_compression_rate": 1}


def save_and_load(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def own_memory(state):
    """What this rank remembers: errors that are not averaged, and factors."""
    return state.__getstate__()["memory"]


# --- options


def test_signature_begins_as_pytorchs():
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


def test_options_and_counters_are_attributes_as_in_pytorch():
    arguments = (None, 3, 20, 1.5, False, False, 1e-8, 7, 0, True)
    theirs, mine = pytorchs.PowerSGDState(*arguments), PowerSGDState(*arguments)
    private = {"rng", "error_dict", "p_memory_dict", "q_memory_dict"}
    for name in set(pytorchs.PowerSGDState.__slots__) - private:
        assert getattr(mine, name) == getattr(theirs, name), name


@pytest.mark.parametrize("start", [-1, 0, 1, 2])
@pytest.mark.parametrize("warm_start", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("feedback", [False, True], ids=["forgets", "remembers"])
def test_an_early_start_raises_as_in_pytorch(start, warm_start, feedback):
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


def test_options_are_copies_of_the_callers_dictionaries():
    ranks, stacks = {"a": 1}, {"b": 2}
    state = PowerSGDState(None, ranks=ranks, stacks=stacks)
    ranks["c"], stacks["d"] = 3, 4
    assert (state.ranks, state.stacks) == ({"a": 1}, {"b": 2})


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
def test_statistics_are_pytorchs(worlds, model, rank):
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
def test_statistics_are_logged_once_in_so_many_steps(worlds, frequency, expected):
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


def test_statistics_of_alternating_count_the_side_that_is_sent(worlds):
    for sent, shapes in worlds(1).run(alternating_statistics, wrapper="gradwire"):
        raw = sum(shape[0] for shape in shapes if len(shape) == 1)
        rows, columns = (sum(shape[side] for shape in shapes if len(shape) == 2) for side in (0, 1))
        assert sent == [raw + rows, raw + columns] * 2


# --- checkpoints


def trained(wrapper, model="mlp", *, state=None, steps=5, hook=powerSGD_hook, options=None, **ddp_options):
    """A state after some steps, on this rank's own batches."""
    module = build(model)
    state = PowerSGDState(None, **(EARLY | (options or {}))) if state is None else state
    train(wrapper, module, hook=(state, hook), steps=steps, **ddp_options)
    return state, module


VARIANTS = {
    "plain": {},
    "rank 2": {"matrix_approximation_rank": 2},
    "no feedback": {"use_error_feedback": False},
    "cold": {"warm_start": False},
    "alternating": {"alternating": True},
    "bf16 factors": {"factor_dtype": torch.bfloat16},
}


def round_trip(wrapper, options, hook="powerSGD_hook", model="mlp"):
    state, _ = trained(wrapper, model, hook=getattr(ours, hook), options=options, bucket_cap_mb=SMALL)
    saved = state.state_dict()
    loaded = PowerSGDState(None, **(EARLY | options))
    loaded.load_state_dict(save_and_load(saved))
    return saved, loaded.state_dict(), own_memory(state)


@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_law7_state_loads_by_default_and_comes_back_as_it_was(worlds, variant, hook):
    options = VARIANTS[variant]
    results = worlds(2).run(round_trip, wrapper="gradwire", options=options, hook=hook)
    for saved, again, _ in results:
        assert_same_bits(again, saved)  # the mean of two equal errors is exact
        assert set(saved) == {"iter", "errors", "q", "p", "numel"}
        assert saved["iter"] == 5
        assert bool(saved["errors"]) == options.get("use_error_feedback", True)
        assert bool(saved["p"]) == options.get("alternating", False)
        for tensors in (saved["errors"], saved["q"], saved["p"]):
            for tensor in tensors.values():
                assert type(tensor) is torch.Tensor
                assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")
                assert tensor.untyped_storage().nbytes() == tensor.nbytes, "no more than itself in the file"
    assert_same_on_all_ranks([saved for saved, *_ in results])


@pytest.mark.parametrize("model", ["mlp", "conv", "complex", "odd", "mixed", "brain", "half"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_saved_errors_are_the_means_over_the_ranks(world, wrapper, model):
    results = world.run(round_trip, wrapper=wrapper, options={}, model=model)
    own = [memory["errors"] for *_, memory in results]
    assert own[0].keys() == results[0][0]["errors"].keys() != set()
    for name, saved in results[0][0]["errors"].items():
        errors = torch.stack([errors[name].double() for errors in own])
        # A division and a sum a rank, each rounded once.
        u = U[saved.dtype]
        assert ((errors.mean(0) - saved).abs() <= 2 * world.size * u * errors.abs().mean(0)).all()
        assert not torch.equal(errors[0], errors[1])
    for other in ("q", "p", "iter", "numel"):
        assert_same_on_all_ranks([memory[other] for *_, memory in results])


def snapshot(wrapper):
    state, module = trained(wrapper)
    saved = state.state_dict()
    before = copy.deepcopy(saved)
    loaded = PowerSGDState(None, **EARLY)
    loaded.load_state_dict(saved)
    train(wrapper, module, hook=(state, powerSGD_hook), steps=3)
    for tensors in (saved["errors"], saved["q"]):
        for tensor in tensors.values():
            tensor.add_(0)
    trained(wrapper, state=loaded, steps=3)
    return before, saved


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_saved_and_loaded_states_share_no_memory_with_a_state_that_trains(worlds, wrapper):
    for before, saved in worlds(2).run(snapshot, wrapper=wrapper):
        assert_same_bits(saved, before)


def a_state():
    error, factor = torch.arange(6.0).view(2, 3), torch.ones(1, 1, 3)
    return {"iter": 4, "errors": {"a": error}, "q": {"a": factor}, "p": {"a": torch.ones(1, 1, 2)}, "numel": [12, 10]}


BAD_STATES = {
    "empty": {},
    "none": None,
    "a list": [1, 2],
    "other names": {"iteration": 1},
    **{f"no {key}": {other: value for other, value in a_state().items() if other != key} for key in a_state()},
    "iter is a string": a_state() | {"iter": "4"},
    "iter is none": a_state() | {"iter": None},
    "errors are a list": a_state() | {"errors": [torch.ones(2, 3)]},
    "errors are a tensor": a_state() | {"errors": torch.ones(2, 3)},
    "an error is a list": a_state() | {"errors": {"a": [1.0]}},
    "an error has no name": a_state() | {"errors": {3: torch.ones(2, 3)}},
    "a factor is none": a_state() | {"q": {"a": None}},
    "numel is a number": a_state() | {"numel": 12},
    "numel is short": a_state() | {"numel": [12]},
    "numel is long": a_state() | {"numel": [12, 10, 8]},
    "numel is not of numbers": a_state() | {"numel": [12, "ten"]},
    "numel has nothing": a_state() | {"numel": [12, None]},
}


# Those of whose entries one is wrong, and none is missing.
WRONG_ENTRIES = {
    "iter is a string": "iter is '4'; expected a whole number",
    "iter is none": "iter is None; expected a whole number",
    "errors are a list": r"errors is \[.*; expected a dictionary",
    "errors are a tensor": r"errors is a strided Tensor of torch\.float32 of shape \(2, 3\).*; expected a dictionary",
    "an error is a list": r"errors\['a'\] is \[1\.0\]; expected a dense tensor of torch\.float32 or torch\.float64",
    "an error has no name": "errors has the name 3; expected a string",
    "a factor is none": r"q\['a'\] is None; expected a dense tensor",
    "numel is a number": "numel is 12; expected a list of two",
    "numel is short": r"numel is \[12\]; expected a list of two",
    "numel is long": r"numel is \[12, 10, 8\]; expected a list of two",
    "numel is not of numbers": r"numel\[1\] is 'ten'; expected a whole number",
    "numel has nothing": r"numel\[1\] is None; expected a whole number",
}


def load_bad(bad):
    state = PowerSGDState(None)
    state.load_state_dict(a_state())
    try:
        state.load_state_dict(BAD_STATES[bad])
        raised = None
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return raised, state.state_dict()


@pytest.mark.parametrize("bad", BAD_STATES)
def test_a_wrong_state_raises_and_changes_nothing(worlds, bad):
    ((raised, after),) = worlds(1).run(load_bad, bad=bad)
    assert_same_bits(after, a_state())
    entries = "expected iter, errors, q, p and numel, as PowerSGDState"
    assert re.match(f"ValueError: {WRONG_ENTRIES.get(bad, f'The state .*{entries}')}", str(raised))


def load_state_of_other_shapes(wrapper):
    state, _ = trained(wrapper)
    saved = state.state_dict()
    name = next(iter(saved["errors"]))
    saved["errors"][name] = torch.ones(3, 3)
    del saved["q"][name]  # which would not fit it: loading would raise
    state = PowerSGDState(None, **EARLY)
    state.load_state_dict(saved)
    try:
        trained(wrapper, state=state, steps=1)
    except ValueError as error:
        return name, str(error)
    return name, "trains"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_state_of_another_model_raises_at_the_first_step(worlds, wrapper):
    for name, message in worlds(2).run(load_state_of_other_shapes, wrapper=wrapper):
        assert re.match(rf"The error memory of {name} has shape \(3, 3\), its gradient .*Load the state of", message)


def state_dict_of_a_new_state():
    state = PowerSGDState(None, **EARLY)
    module = build("mlp")
    state.bind(module)
    saved = state.state_dict()
    loaded = PowerSGDState(None, **EARLY)
    loaded.load_state_dict(save_and_load(saved))
    return saved, loaded.state_dict()


def test_a_new_state_that_is_bound_has_zeros(worlds):
    for saved, loaded in worlds(2).run(state_dict_of_a_new_state):
        assert_same_bits(loaded, saved)
        weights = sorted(name for name, parameter in build("mlp").named_parameters() if parameter.dim() == 2)
        assert sorted(saved["errors"]) == sorted(saved["q"]) == weights
        assert all(not error.any() for error in saved["errors"].values())


def pickled(wrapper):
    options = {
        "matrix_approximation_rank": 3,
        "start_powerSGD_iter": 2,
        "min_compression_rate": 1.25,
        "orthogonalization_epsilon": 1e-8,
        "random_seed": 5,
        "compression_stats_logging_frequency": 7,
        "batch_tensors_with_same_shape": True,
        "ranks": {"*.0.*": 1},
        "stacks": {"layers.4.weight": 1},
        "factor_dtype": torch.bfloat16,
        "alternating": True,
    }
    state = PowerSGDState(dist.group.WORLD, **options)
    trained(wrapper, state=state)
    found = []
    for other in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        changed = {name: getattr(other, name) for name in options if getattr(other, name) != options[name]}
        found.append((changed, other.process_group, other.compression_stats(), copy.deepcopy(own_memory(other))))
        trained(wrapper, state=other, steps=1)
    return found, (state.compression_stats(), own_memory(state))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_pickled_or_copied_state_keeps_options_and_its_ranks_own_memory(worlds, wrapper):
    results = worlds(2).run(pickled, wrapper=wrapper)
    for found, (statistics, memory) in results:
        for changed, process_group, statistics_then, memory_then in found:
            assert changed == {}
            assert process_group is None, "left behind, as in PyTorch"
            assert statistics_then == statistics
            assert_same_bits(memory_then, memory)
    first, second = (memory["errors"] for _, (_, memory) in results)
    assert not torch.equal(*(errors[min(errors)] for errors in (first, second)))


def train_a_copy(copied):
    module = build("mlp")
    ddp = WRAPPERS["gradwire"](module, bucket_cap_mb=SMALL)
    register(ddp, (PowerSGDState(None, **EARLY), powerSGD_hook))
    seen = []
    for i in range(TOTAL):
        if copied and i == CUT:
            ddp = pickle.loads(pickle.dumps(ddp))
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(10 * i + dist.get_rank())
        ddp(*module.batch(generator)).backward()
        seen.append(gradients(ddp))
    return seen


def test_a_pickled_ddp_trains_on_with_its_errors(worlds):
    # Products of tensors that are aligned in another way may be rounded in another way. Measured: 0.0002 of this.
    for whole, copied in zip(*(worlds(2).run(train_a_copy, copied=copied) for copied in (False, True)), strict=True):
        assert relative_deviation(copied, whole) <= TOLERANCE * U[torch.float32]


# --- torch.distributed.checkpoint


def save_distributed(path, wrapper, model, options, hook):
    state, _ = trained(wrapper, model, hook=getattr(ours, hook), options=options, bucket_cap_mb=SMALL)
    dcp.save({"powersgd": state}, checkpoint_id=path)
    return state.state_dict()


def load_distributed(path, wrapper, model, options, hook, steps):
    module = build(model)
    state = PowerSGDState(None, **(EARLY | options))
    state.bind(module)
    hook = getattr(ours, hook)
    if steps:
        train(wrapper, module, hook=(state, hook), steps=steps)
    dcp.load({"powersgd": state}, checkpoint_id=path)
    loaded = state.state_dict()
    train(wrapper, module, hook=(state, hook), steps=1)
    return loaded


@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "after-some-steps"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_law7_distributed_checkpoint_round_trip(worlds, tmp_path, variant, steps):
    case = {"path": str(tmp_path), "model": "mlp", "options": VARIANTS[variant], "hook": "powerSGD_hook"}
    saved = worlds(2).run(save_distributed, wrapper="pytorch", **case)
    loaded = worlds(2).run(load_distributed, wrapper="gradwire", steps=steps, **case)
    assert_same_bits(loaded, saved)


def test_law7_distributed_checkpoint_of_the_batched_hook(worlds, tmp_path):
    # Its errors are those of all parameters; its factors are the buckets', and begin anew. Which hook a state is for
    # shows at the first step.
    case = {"path": str(tmp_path), "model": "mlp", "options": {}, "hook": "batched_powerSGD_hook"}
    saved = worlds(2).run(save_distributed, wrapper="gradwire", **case)
    loaded = worlds(2).run(load_distributed, wrapper="gradwire", steps=1, **case)
    assert_same_bits([state["errors"] for state in loaded], [state["errors"] for state in saved])


@pytest.mark.parametrize("model", ["conv", "lstm", "frozen", "complex", "odd", "brain"])
def test_law7_distributed_checkpoint_of_any_model(worlds, tmp_path, model):
    case = {"path": str(tmp_path), "model": model, "options": {}, "hook": "powerSGD_hook"}
    saved = worlds(2).run(save_distributed, wrapper="gradwire", **case)
    loaded = worlds(2).run(load_distributed, wrapper="pytorch", steps=0, **case)
    assert_same_bits(loaded, saved)


@pytest.mark.parametrize("after", [1, 3])
def test_law7_distributed_checkpoint_on_another_number_of_ranks(worlds, tmp_path, after):
    case = {"path": str(tmp_path), "wrapper": "gradwire", "model": "mlp", "options": {}, "hook": "powerSGD_hook"}
    saved = worlds(2).run(save_distributed, **case)[0]
    for loaded in worlds(after).run(load_distributed, steps=0, **case):
        for name, error in saved["errors"].items():  # averaging equal errors rounds again, as in saving them
            assert ((loaded["errors"][name] - error).abs() <= 2 * after * U[error.dtype] * error.abs()).all()
        assert_same_bits(loaded["q"], saved["q"])
        assert (loaded["iter"], loaded["numel"]) == (saved["iter"], saved["numel"])


# --- names


def names(wrapper, bind, cap):
    module = build("mlp")
    state = PowerSGDState(None, **EARLY)
    ddp = WRAPPERS[wrapper](module, bucket_cap_mb=cap)
    if bind:
        state.bind({"module": module, "ddp": ddp}[bind])
        state.bind(module)  # again
    register(ddp, (state, powerSGD_hook))
    for _ in range(4):
        ddp.zero_grad()
        ddp(*module.batch(torch.Generator())).backward()
    weights = [name for name, parameter in module.named_parameters() if parameter.dim() == 2]
    return sorted(own_memory(state)["errors"]), sorted(weights)


@pytest.mark.parametrize("cap", [SMALLEST, 25], ids=["many-buckets", "one-bucket"])
def test_law7_state_is_keyed_by_parameter_name(worlds, cap):
    for wrapper in WRAPPERS:
        for bind in (None, "module", "ddp"):
            ((found, weights),) = worlds(1).run(names, wrapper=wrapper, bind=bind, cap=cap)
            assert found == weights


@pytest.mark.parametrize("wrapper", [None, *WRAPPERS])
def test_binding_a_second_model_raises(worlds, wrapper):
    ((message, name),) = worlds(1).run(bind_twice, wrapper=wrapper)
    assert re.match("This state belongs to another model, a Mlp; .* Make a new state for this ConvNet", message)
    assert name == "Mlp", "the first stays"


def bind_twice(wrapper):
    first, second = build("mlp"), build("conv")
    state = PowerSGDState(None)
    state.bind(first if wrapper is None else WRAPPERS[wrapper](first))
    try:
        state.bind(second if wrapper is None else WRAPPERS[wrapper](second))
    except ValueError as error:
        return str(error), type(state._names.module).__name__
    return "no error", ""


def register_for_two_models():
    state = PowerSGDState(None, **EARLY)
    module = build("mlp")
    register(WRAPPERS["gradwire"](module), (state, powerSGD_hook))
    register(WRAPPERS["gradwire"](module), (state, powerSGD_hook))  # the same one may be wrapped again
    try:
        register(WRAPPERS["gradwire"](build("mlp")), (state, powerSGD_hook))
    except ValueError as error:
        return str(error)
    return "no error"


def test_gradwires_ddp_refuses_the_state_of_another_model_at_registration(worlds):
    for message in worlds(1).run(register_for_two_models):
        assert re.match("This state belongs to another model, a Mlp; .*Make a new state for this Mlp", message)


def use_for_two_models():
    state = PowerSGDState(None, **EARLY)
    models = [WRAPPERS["pytorch"](build("mlp"), bucket_cap_mb=SMALL) for _ in range(2)]
    for ddp in models:
        register(ddp, (state, powerSGD_hook))
    batch = models[0].module.batch(torch.Generator())
    models[0](*batch).backward()
    try:
        models[1](*batch).backward()
    except ValueError as error:
        return str(error)
    return "no error"


def test_pytorchs_ddp_meets_the_state_of_another_model_at_the_first_backward(worlds):
    for message in worlds(1).run(use_for_two_models):
        assert re.match(r"A parameter of shape \(.*\) belongs to another model.*Make a new state for each", message)


# --- resuming


BATCH = 12  # of all ranks together; 1, 2 and 3 divide it


def run(state, wrapper, steps, dtype, checkpoint=None, other_steps=(), **ddp_options):
    """Train, and return the gradients of each step, which depend on no number of ranks but by rounding.

    Args:
        state: of the hook; loaded from the checkpoint, too.
        wrapper: a name of `WRAPPERS`.
        steps: their numbers, which give their batches.
        dtype: of the model.
        checkpoint: to go on from.
        other_steps: of another run, trained before the checkpoint is loaded.
        ddp_options: for the constructor of the wrapper.
    """
    module = build("mlp").to(dtype)
    ddp = WRAPPERS[wrapper](module, **ddp_options)
    register(ddp, (state, powerSGD_hook))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    def train_on(i):
        batch = torch.randn(BATCH, 11, generator=torch.Generator().manual_seed(i)).to(dtype)
        optimizer.zero_grad()
        ddp(batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
        optimizer.step()
        return gradients(ddp)

    for i in other_steps:
        train_on(i)
    if checkpoint is not None:
        module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        state.load_state_dict(checkpoint["powersgd"])
    seen = [train_on(i) for i in steps]
    return seen, {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


def run_and_save(path, cut, total, wrapper, options, **case):
    """Rank 0 saves after ``cut`` steps; returns the later gradients of a run that is not interrupted."""
    uninterrupted, _ = run(PowerSGDState(None, **(EARLY | options)), wrapper, range(total), **case)
    state = PowerSGDState(None, **(EARLY | options))
    _, checkpoint = run(state, wrapper, range(cut), **case)
    checkpoint["powersgd"] = state.state_dict()
    checkpoint["errors of rank 0"] = own_memory(state)["errors"]
    if dist.get_rank() == 0:
        torch.save(checkpoint, path)
    dist.barrier()
    return uninterrupted[cut:]


# What a checkpoint could have done wrong.
CHANGES = {
    "nothing": lambda saved, checkpoint: saved,
    "no errors": lambda saved, checkpoint: saved | {"errors": {}},
    "errors of rank 0": lambda saved, checkpoint: saved | {"errors": checkpoint["errors of rank 0"]},
    "no factors": lambda saved, checkpoint: saved | {"q": {}, "p": {}},
    "no iter": lambda saved, checkpoint: saved | {"iter": 0},
}


def resume(path, cut, total, wrapper, options, change="nothing", **case):
    checkpoint = torch.load(path)
    checkpoint["powersgd"] = CHANGES[change](checkpoint["powersgd"], checkpoint)
    state = PowerSGDState(None, **(EARLY | options))
    seen, _ = run(state, wrapper, range(cut, total), checkpoint=checkpoint, **case)
    return seen


def relative_deviation(steps, expected):
    """Of all gradients of a step together, the largest of the steps."""
    worst = 0.0
    for step, other in zip(steps, expected, strict=True):
        flat = [torch.cat([gradient.double().flatten() for gradient in tree_leaves(s)]) for s in (step, other)]
        worst = max(worst, ((flat[0] - flat[1]).norm() / flat[1].norm()).item())
    return worst


CUT, TOTAL = 6, 10
# In half ulps. A gradient is sums over at most 31 units and 12 samples in each of 4 layers and back, and PowerSGD adds
# three products over at most 31 terms: about 8 * 31 + 3 * 31 < 400 roundings. A step adds its own to those that the
# parameters, the error and the factors bring from the step before, and a column of P loses |M| |q| / |M q| < 10 more.
TOLERANCE = 400 * 10 * (TOTAL - CUT)


@pytest.fixture(scope="module")
def saved_run(worlds, tmp_path_factory):
    """Makes a checkpoint on two ranks, once for each of its arguments; returns its path and the uninterrupted run."""
    made = {}

    def make(wrapper="gradwire", cap=SMALLEST, dtype=torch.float32, **options):
        key = (wrapper, cap, dtype, *options.items())
        if key not in made:
            path = tmp_path_factory.mktemp("checkpoint") / "checkpoint.pt"
            case = {"path": path, "cut": CUT, "total": TOTAL, "wrapper": wrapper, "bucket_cap_mb": cap, "dtype": dtype}
            made[key] = path, worlds(2).run(run_and_save, options=options, **case)[0]
        return made[key]

    return make


def deviations(
    world, saved, wrapper="gradwire", cap=SMALLEST, dtype=torch.float32, change="nothing", other_steps=(), **options
):
    path, uninterrupted = saved
    case = {"path": path, "cut": CUT, "total": TOTAL, "wrapper": wrapper, "bucket_cap_mb": cap, "dtype": dtype}
    results = world.run(resume, change=change, options=options, other_steps=other_steps, **case)
    assert_same_on_all_ranks(results)
    return relative_deviation(results[0], uninterrupted)


@pytest.mark.parametrize("dtype", U)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_law7_training_resumes_on_another_number_of_ranks(worlds, saved_run, ranks, dtype):
    # Measured: 0.02 of the tolerance.
    saved = saved_run(dtype=dtype)
    assert deviations(worlds(ranks), saved, dtype=dtype) <= TOLERANCE * U[dtype]


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "nothing"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_law7_everything_in_the_state_is_needed_to_resume(worlds, saved_run, ranks, change):
    # The failing twin of the test above. Measured: 0.9 to 1.3, which is 5e11 times the tolerance.
    dtype = torch.float64
    deviation = deviations(worlds(ranks), saved_run(dtype=dtype), dtype=dtype, change=change)
    assert deviation > max(0.1, 1e6 * TOLERANCE * U[dtype])


BUCKETS = {"a bucket each": SMALLEST, "one": 25}


@pytest.mark.parametrize("after", BUCKETS)
@pytest.mark.parametrize("before", BUCKETS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_law7_training_resumes_on_other_buckets_and_on_the_other_ddp(worlds, saved_run, wrapper, before, after):
    saved = saved_run(wrapper, BUCKETS[before])
    for other in WRAPPERS:
        assert deviations(worlds(2), saved, other, BUCKETS[after]) <= TOLERANCE * U[torch.float32]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("other_steps", [1, 5], ids=["before-the-start", "after-the-start"])
def test_law7_loading_goes_back_in_the_middle_of_a_run(worlds, saved_run, wrapper, other_steps):
    saved, steps = saved_run(dtype=torch.float64), range(100, 100 + other_steps)
    deviation = deviations(worlds(2), saved, wrapper, dtype=torch.float64, other_steps=steps)
    assert deviation <= TOLERANCE * U[torch.float64]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "bf16 factors"])
def test_law7_every_variant_resumes(worlds, saved_run, variant, ranks):
    # Without bf16 factors, because the sum of shares that are rounded to bf16 depends on their number.
    options = VARIANTS[variant]
    saved = saved_run(dtype=torch.float64, **options)
    assert deviations(worlds(ranks), saved, dtype=torch.float64, **options) <= TOLERANCE * U[torch.float64]


def save_between_steps(wrapper, saved_before):
    module = build("mlp")
    state = PowerSGDState(None, **EARLY)
    ddp = WRAPPERS[wrapper](module, bucket_cap_mb=SMALL)
    register(ddp, (state, powerSGD_hook))
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for i in range(6):
        if i in saved_before:
            state.state_dict()
        ddp.zero_grad()
        ddp(*module.batch(generator)).backward()
        seen.append(gradients(ddp))
    return seen


@pytest.mark.parametrize("saved_before", [[0], [1, 2], [3, 4, 5]], ids=["at-first", "early", "later"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_saving_changes_nothing(worlds, wrapper, saved_before):
    saving, quiet = (worlds(2).run(save_between_steps, wrapper=wrapper, saved_before=s) for s in (saved_before, []))
    assert_same_bits(saving, quiet)


def wrap_anew(wraps, steps_each):
    """One module, optimizer and state, behind one DDP after another; the gradients of each step."""
    module = build("mlp")
    state = PowerSGDState(None, **EARLY)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for wrapper, cap in wraps:
        ddp = WRAPPERS[wrapper](module, bucket_cap_mb=cap)
        register(ddp, (state, powerSGD_hook))
        for _ in range(steps_each):
            optimizer.zero_grad()
            ddp(*module.batch(generator)).backward()
            seen.append(gradients(ddp))
            optimizer.step()
        del ddp
        gc.collect()  # its hooks watch the parameters as long as it lives
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_law7_buckets_are_rebuilt_in_the_middle_of_a_run(worlds, wrapper):
    # A new DDP begins with one bucket, in the order of the model, and rebuilds it after the first backward.
    anew = [(wrapper, 25), (wrapper, SMALLEST), ("gradwire", SMALL), (wrapper, 25), ("pytorch", SMALLEST)]
    many = worlds(2).run(wrap_anew, wraps=anew, steps_each=TOTAL // 5)
    once = worlds(2).run(wrap_anew, wraps=[(wrapper, SMALL)], steps_each=TOTAL)
    assert relative_deviation(many[0], once[0]) <= TOLERANCE * U[torch.float32]
    assert_same_on_all_ranks(many)


def cast_in_the_middle(dtype, through_checkpoint):
    """Of all gradients given to this rank, what has not come out; and this rank's error, before and after the cast."""
    shape = (24, 20)
    module = Probe(shape)
    state = PowerSGDState(None, **EARLY)
    generator = torch.Generator().manual_seed(dist.get_rank())
    left, largest, errors = torch.zeros(shape, dtype=torch.float64), 0.0, []
    for model_dtype in (torch.float32, dtype):
        module.to(model_dtype)
        if through_checkpoint and errors:
            saved = save_and_load(state.state_dict())
            state = PowerSGDState(None, **EARLY)
            state.load_state_dict(saved)
        ddp = WRAPPERS["gradwire"](module)
        register(ddp, (state, powerSGD_hook))
        for _ in range(6):
            tensor = torch.randn(shape, generator=generator).to(model_dtype)
            ddp.zero_grad()
            ddp(tensor).backward()
            left += tensor.double() - module.weights[0].grad.double()
            largest = max(largest, left.abs().max().item())
        errors.append(state.state_dict()["errors"]["weights.0"])
        del ddp
        gc.collect()
    return left, largest, errors


@pytest.mark.parametrize("through_checkpoint", [False, True], ids=["same-state", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_that_is_cast_keeps_its_errors(worlds, dtype, through_checkpoint):
    results = worlds(2).run(cast_in_the_middle, dtype=dtype, through_checkpoint=through_checkpoint)
    left, largest, errors = zip(*results, strict=True)
    assert [error.dtype for error in errors[0]] == [
        torch.float32,
        torch.float64 if dtype == torch.float64 else torch.float32,
    ]
    # M = G + E and E = M - out round once each in every one of 12 steps, and their mean twice, twice over if it is
    # saved; M is at most twice what is left. Measured: 0.01 of this.
    assert (sum(left) / 2 - errors[0][-1]).abs().max() <= (2 * 12 + 4) * U[torch.float32] * 2 * max(largest)


def restart(hook, before, after, restarted):
    """Of all gradients given to this rank, what has not come out, through a restart; and the mean error at the end."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def draw():
        return [
            torch.randn(24, 20, generator=generator).t(),
            torch.randn(6, 3, 3, 5, generator=generator).permute(0, 3, 1, 2),  # channels last
            torch.randn(12, 10, generator=generator, dtype=torch.complex64),
            torch.randn(7, generator=generator),
        ]

    module = Probe()
    module.weights = torch.nn.ParameterList(torch.zeros_like(tensor) for tensor in draw())
    left, largest = [torch.zeros_like(tensor, dtype=torch.complex128) for tensor in draw()], 0.0
    state = PowerSGDState(None, **EARLY)
    for (wrapper, cap), steps in ((before, 6), (after, 6)):
        ddp = WRAPPERS[wrapper](module, bucket_cap_mb=cap)
        register(ddp, (state, getattr(ours, hook)))
        for _ in range(steps):
            tensors = draw()
            ddp.zero_grad()
            ddp(*tensors).real.backward()
            for rest, tensor, weight in zip(left, tensors, module.weights, strict=True):
                rest += tensor.conj() - weight.grad
                largest = max(largest, rest.abs().max().item())
        saved = state.state_dict()
        if restarted:
            state = PowerSGDState(None, **EARLY)
            state.load_state_dict(save_and_load(saved))
        del ddp
        gc.collect()
    return left, largest, saved["errors"]


@pytest.mark.parametrize("restarted", [False, True], ids=["same-state", "checkpoint"])
@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_law7_nothing_is_lost_in_any_layout_through_a_restart(worlds, wrapper, hook, restarted):
    case = {"hook": hook, "before": (wrapper, SMALLEST), "after": ("gradwire", 25)}
    left, largest, errors = zip(*worlds(2).run(restart, restarted=restarted, **case), strict=True)
    assert len(errors[0]) == (3 if hook == "powerSGD_hook" else 4)
    for i, tensors in enumerate(zip(*left, strict=True)):
        mean = sum(tensors) / 2
        kept = errors[0].get(f"weights.{i}", torch.zeros(()))
        kept = torch.view_as_complex(kept) if i == 2 else kept
        # As for a model that is cast. Measured: 0.02 of this.
        assert (mean - kept).abs().max() <= (2 * 12 + 4) * U[torch.float32] * 2 * max(largest)


# --- memory


def memory(wrapper, model, hook, options):
    module = build(model)
    state = PowerSGDState(None, **(EARLY | options))
    ddp = WRAPPERS[wrapper](module, bucket_cap_mb=SMALL)
    register(ddp, (state, getattr(ours, hook)))
    generator = torch.Generator().manual_seed(0)
    held = []
    for _ in range(5):
        ddp.zero_grad()
        ddp(*module.batch(generator)).backward()
        held.append(state.error_memory_bytes)
    compressed, everything = 0, 0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            real = parameter.numel() * (2 if parameter.is_complex() else 1)
            nbytes = real * (8 if parameter.dtype == torch.float64 else 4)
            everything += nbytes
            compressed += nbytes if state.policy.matrix_shape(name, parameter) is not None else 0
    storages = {
        error.untyped_storage()._cdata: error.untyped_storage().nbytes()
        for error in own_memory(state)["errors"].values()
    }
    return held, compressed, everything, sum(storages.values())


@pytest.mark.parametrize("model", ["mlp", "transformer", "conv", "complex", "mixed", "brain", "half", "frozen"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_error_memory_is_the_compressed_gradients_in_fp32(worlds, wrapper, model):
    # In fp64 for fp64 gradients.
    case = {"wrapper": wrapper, "model": model, "hook": "powerSGD_hook"}
    ((held, compressed, everything, stored),) = worlds(1).run(memory, options={}, **case)
    assert held == [0, 0] + [compressed] * 3
    assert 0 < compressed < everything
    assert stored == compressed, "what the tensors hold in fact"
    ((held, *_, stored),) = worlds(1).run(memory, options={"use_error_feedback": False}, **case)
    assert held == [0] * 5
    assert stored == 0


def test_error_memory_of_the_batched_hook_is_all_gradients_in_fp32(worlds):
    case = {"wrapper": "gradwire", "model": "mlp", "hook": "batched_powerSGD_hook", "options": {}}
    ((held, _, everything, stored),) = worlds(1).run(memory, **case)
    assert held == [0, 0] + [everything] * 3
    assert stored == everything


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
def test_a_step_makes_no_tensor_of_the_size_of_a_gradient(dtype, feedback, kind):
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
                steps = alternating_all_reduce(bucket, sources, sources, i, transport, workspace)
            else:
                steps = powersgd_all_reduce(
                    bucket, sources, sources, i, transport, workspace, warm_start=kind == "warm"
                )
            run_algorithm(steps, transport)
    # All P of the bucket together, in fp64, are 3 * 4 * 1024 * 8 bytes: 1/21 of a matrix in 16 bit.
    assert allocations.nbytes, "the factors' small tensors are seen"
    assert max(allocations.nbytes) <= sources[0].nbytes / 20
