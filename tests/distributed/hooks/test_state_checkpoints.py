"""Checkpoints of every hook state: entries, merged errors, copies, prepared copies, and errors of another model."""

import copy
import pickle
import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._pytree import tree_leaves

from gradwire.exchange import hook_state
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks, differences
from tests.support.features import FEATURES, Parts
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import FEEDBACK, START, STATES, Training, U, errors_of, make, save_and_load
from tests.support.training import SMALLEST, WRAPPERS, build, message_of, own_batches, register, train_steps, wrapped
from tests.support.zoo import SparseTable

states = pytest.mark.parametrize("kind", STATES)
feedback_states = pytest.mark.parametrize("kind", FEEDBACK)
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


def trained(kind, wrapper="gradwire", model="mlp", **options):
    training = Training(kind, wrapper, model, **options)
    training.run(START + 2)
    return training


# --- entries

OF_POWERSGD = {"iter", "errors", "q", "p", "numel"}
ENTRIES = {
    "powersgd": OF_POWERSGD,
    "powersgd_alternating": OF_POWERSGD,
    "batched_powersgd": OF_POWERSGD,
    "int4": {"iter", "errors"},
    "topk": {"iter", "errors"},
    "scaled_fp16": {"iter", "names", "exponents", "counters"},
}


@states
@wrappers
@on_ranks(2)
def test_law7_state_round_trip_with_weights_only_is_bitwise_equal(kind, wrapper):
    training = trained(kind, wrapper)
    saved = training.state.state_dict()
    assert set(saved) == ENTRIES.get(kind, set(saved))
    assert saved.get("iter", START + 2) == START + 2
    for tensor in tree_leaves(saved):
        if isinstance(tensor, torch.Tensor):
            assert type(tensor) is torch.Tensor
            assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu") or kind == "scaled_fp16"
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a file holds no more than the tensor"
    assert_same_on_all_ranks(from_all_ranks(saved))
    loaded, _ = make(kind, training.module)
    loaded.load_state_dict(save_and_load(saved, weights_only=True))
    assert_same_bits(loaded.state_dict(), saved)  # means and sums of two equal errors are exact


@feedback_states
@on_ranks(2, 3)
def test_entries_have_the_same_order_on_all_ranks_and_are_no_drift(kind):
    # Sets of names have another order on each rank, as the seed of Python's `hash` differs.
    training = trained(kind, bucket_cap_mb=SMALLEST, check_every=1)
    saved = training.state.state_dict()
    orders = [list(entry) for entry in saved.values() if isinstance(entry, dict)]
    assert_same_on_all_ranks(from_all_ranks(orders))
    assert max(map(len, orders)) >= 4
    training.state.load_state_dict(saved)
    training.run(2)


@wrappers
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        *(("powersgd", model) for model in ("mlp", "conv", "complex", "odd", "mixed", "brain", "half")),
        *((kind, "mlp") for kind in ("batched_powersgd", "int4")),
    ],
)
@on_ranks(2, 3)
def test_saved_errors_are_means_or_sums_over_ranks_as_declared(kind, model, wrapper):
    state = trained(kind, wrapper, model).state
    saved, own = state.state_dict()["errors"], from_all_ranks(state.memory.tensors("errors"))
    divisor = {"mean": len(own), "sum": 1}[state.memory.declared["errors"].merge]
    assert saved.keys() == own[0].keys() != set()
    for name, merged in saved.items():
        errors = torch.stack([errors[name].double() for errors in own])
        # A division and a sum a rank, each rounded once.
        bound = 2 * len(own) * U[merged.dtype] * errors.abs().sum(0) / divisor
        assert ((errors.sum(0) / divisor - merged).abs() <= bound).all()
        assert not torch.equal(errors[0], errors[1])


@pytest.mark.parametrize(
    ("model", "bound"), [("mlp", None), ("mlp", "module"), ("mlp", "ddp"), ("frozen", None), ("lstm", None)]
)
@states
@wrappers
@on_ranks(1)
def test_law7_checkpoint_is_keyed_by_parameter_name_with_and_without_bind(kind, model, bound, wrapper):
    ddp = wrapped(wrapper, model, bucket_cap_mb=SMALLEST)
    state, hook = make(kind, ddp.module)
    if bound is not None:
        state.bind(ddp if bound == "ddp" else ddp.module)
        state.bind(ddp.module)  # again
    register(ddp, (state, hook))
    train_steps(ddp, START + 1)
    names = [name for name, p in ddp.module.named_parameters() if p.requires_grad]
    matrices = [name for name, p in ddp.module.named_parameters() if p.requires_grad and p.dim() > 1]
    if kind == "scaled_fp16":
        assert sorted(state.exponents()) == sorted(names)
        return
    saved = state.state_dict()
    expected = [name for name in names if name in matrices or not kind.startswith("powersgd")]
    assert sorted(errors_of(saved)) == sorted(expected)


@states
@wrappers
@on_ranks(2)
def test_training_modifies_no_saved_and_no_loaded_dictionary(kind, wrapper):
    training = trained(kind, wrapper)
    saved = training.state.state_dict()
    before = copy.deepcopy(saved)
    for each in (training, Training(kind, wrapper, load=saved)):
        each.run(3)
        (each.ddp(*each.module.batch(own_batches())) * torch.inf).backward()  # a skipped step is counted
    assert_same_bits(saved, before)


@pytest.mark.parametrize("kind", ["powersgd", "powersgd_alternating", "int4", "topk"])
@on_ranks(2)
def test_state_before_its_first_step_saves_zero_errors(kind):
    training = Training(kind)
    saved = training.state.state_dict()
    loaded, _ = make(kind, training.module)
    loaded.load_state_dict(save_and_load(saved))
    assert_same_bits(loaded.state_dict(), saved)
    shapes = {
        name: p.shape for name, p in training.module.named_parameters() if p.dim() == 2 or kind in ("int4", "topk")
    }
    assert {name: error.shape for name, error in saved["errors"].items()} == shapes
    assert all(not error.any() for error in saved["errors"].values())
    assert set(saved.get("q", shapes)) == set(shapes)


# --- copies

# Options have other values than by default.
POWERSGD = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 2, "ranks": {"*.0.*": 1}, "alternating": True}
POWERSGD |= {"stacks": {"layers.4.weight": 1}, "factor_dtype": torch.bfloat16}
QUANTIZED = {"wire": "int2", "block_size": 32, "start_iter": 0, "exempt": ["*.2.bias"], "wires": {"*.0.*": "int8"}}
COPIED = {
    "powersgd": (powerSGD_hook, partial(PowerSGDState, **POWERSGD)),
    "quantization": (quantization_hook, partial(QuantizationState, **QUANTIZED)),
    "scaled cast": (scaled_cast_hook, partial(ScaledCastState, dtype=torch.bfloat16, margin=5, growth=2, backoff=3)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", COPIED)
@on_ranks(2)
def test_pickled_or_copied_state_keeps_options_and_memory_of_its_rank(kind, wrapper):
    hook, new_state = COPIED[kind]
    state = new_state(dist.group.WORLD)
    train_steps(wrapped(wrapper, hook=(state, hook)), START + 2)
    memory = own_memory(state)
    for other in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert repr(other) == repr(state) != repr(type(state)(None)), "all options"
        assert other.process_group is None, "not pickled, as in PyTorch"
        assert_same_bits(own_memory(other), memory)
        train_steps(wrapped(wrapper, hook=(other, hook)))
    first, second = from_all_ranks(memory)
    assert differences(first, second) or kind == "scaled cast", "errors are this rank's own"


def own_memory(state):
    if isinstance(state, ScaledCastState):
        return state.state_dict()
    return {entry: copy.deepcopy(state.memory.tensors(entry)) for entry in state.memory.declared} | state._counts


# --- prepared copies


class Meeting(Exception):
    """A call to the other ranks."""


def is_prepared(state):
    """Whether `state_dict` needs no other rank."""
    with mock.patch.object(hook_state, "named_barrier", side_effect=Meeting):
        try:
            state.state_dict()
        except Meeting:
            return False
    return True


DROPS = {
    "step": lambda training, _: training.run(1),
    "load": lambda training, early: training.state.load_state_dict(early),
    # Ranks that had begun the failed step have none: one that still returned its copy would leave them waiting.
    "resynchronization": lambda training, _: training.ddp.resynchronize(),
}


@pytest.mark.parametrize(
    ("how", "wrapper"), [*((how, "gradwire") for how in DROPS), *((how, "pytorch") for how in ("step", "load"))]
)
@feedback_states
@on_ranks(2)
def test_prepared_copy_is_dropped(kind, how, wrapper):
    training = Training(kind, wrapper)
    for steps in (1, START + 2):  # plain, and compressed ones
        training.run(steps)
        early = training.state.state_dict()
        training.state.prepare_checkpoint()
        assert is_prepared(training.state)
        DROPS[how](training, early)
        assert not is_prepared(training.state)


# --- sums over the ranks


class Square(nn.Module):
    """Matrices of one shape, whose errors could be taken for each other's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).square().mean()

    @staticmethod
    def batch(generator):
        return (torch.randn(4, 6, generator=generator),)


def in_another_order(value):
    """A nested dictionary whose entries come in the opposite order."""
    if not isinstance(value, dict):
        return value
    return {key: in_another_order(each) for key, each in reversed(value.items())}


@pytest.mark.parametrize("prepares", [False, True], ids=["collective", "prepared"])
@feedback_states
@on_ranks(2)
def test_errors_in_another_order_on_one_rank_are_summed_by_name(kind, prepares):
    training = trained(kind, model=Square(), bucket_cap_mb=SMALLEST)
    before = training.state.state_dict()
    training.state.load_state_dict(in_another_order(before) if dist.get_rank() == 1 else before)
    if prepares:
        training.state.prepare_checkpoint()
    errors = errors_of(before)
    assert errors.keys() == {f"layers.{i}.weight" for i in range(4)}
    assert len({error.norm().item() for error in errors.values()}) == 4
    assert_same_bits(errors_of(training.state.state_dict()), errors)  # means and sums of two equal errors are exact


# --- parameters that no compressed step has had


class SomeParts(Parts):
    """Uses two of its five layers."""

    @staticmethod
    def batch(generator):
        return torch.randn(3, 4, generator=generator), (0, 2)


class Sparse(SparseTable):
    """A sparse gradient, which no hook compresses, and a dense one."""

    def __init__(self):
        super().__init__(has_dense_layer=True)

    @staticmethod
    def batch(generator):
        return (torch.randint(64, (4,), generator=generator),)


PARTLY_COMPRESSED = {"unused": (SomeParts, FEATURES["skip-unused"]), "sparse": (Sparse, {})}


@wrappers
@pytest.mark.parametrize("situation", PARTLY_COMPRESSED)
@pytest.mark.parametrize("kind", [kind for kind in STATES if kind != "batched_powersgd"])  # whose factors are buckets'
@on_ranks(2)
def test_law7_distributed_checkpoint_loads_uncompressed_parameters(tmp_path, kind, situation, wrapper):
    model, options = PARTLY_COMPRESSED[situation]
    trainings = []
    for _ in range(2):
        torch.manual_seed(0)
        trainings.append(Training(kind, wrapper, model(), bucket_cap_mb=SMALLEST, **options))
    trainings[0].run(START + 2)
    used, fresh = (training.state for training in trainings)
    dcp.save({"hook": used}, checkpoint_id=str(tmp_path))
    dcp.load({"hook": fresh}, checkpoint_id=str(tmp_path))
    saved = used.state_dict()
    assert_same_bits(fresh.state_dict(), saved)  # means and sums of two equal errors are exact
    if kind != "scaled_fp16":
        assert "table.weight" not in errors_of(saved), "no memory for a sparse gradient"


# --- errors of another model


@wrappers
@pytest.mark.parametrize("is_bound", [True, False], ids=["at-load", "at-first-step"])
@feedback_states
@on_ranks(2)
def test_loaded_error_of_right_size_and_other_shape_is_refused(kind, wrapper, is_bound):
    training = trained(kind, wrapper)
    saved = training.state.state_dict()
    for state in saved["states"].values() if "states" in saved else [saved]:
        if (error := state["errors"].get("layers.0.weight")) is not None:
            state["errors"]["layers.0.weight"] = error.t().contiguous()
            for factors in (state.get("q", {}), state.get("p", {})):  # which would not fit it
                factors.pop("layers.0.weight", None)
    if is_bound:
        message = message_of(training.state.load_state_dict, saved)
    else:
        training = Training(kind, wrapper, load=saved)
        message = message_of(training.run, 1)
    assert re.match(
        r"The error memory of layers\.0\.weight has shape \(11, 23\), its gradient \(23, 11\).*Load the state of",
        str(message),
    )
    assert training.state.iter == START + 2


@wrappers
@pytest.mark.parametrize("kind", ["powersgd", "int4", "topk"])
@on_ranks(2, 3)
def test_errors_of_another_models_parameters_are_refused(kind, wrapper):
    name, parameter = next(iter(build("mlp").named_parameters()))
    for names in (["elsewhere.weight"], ["elsewhere.weight", name]):
        training = Training(kind, wrapper)
        errors = {each: torch.zeros(parameter.shape) for each in names}
        loaded = {"iter": 5, "errors": errors, "q": {}, "p": {}, "numel": [0, 0]}
        message = message_of(training.state.load_state_dict, loaded) or message_of(training.run, 1)
        assert (
            f"1 of {len(names)} entries of the error memory belong to parameters that this model does not have, such "
            "as 'elsewhere.weight'"
        ) in message
