"""Compressed training on FSDP2, HSDP, `replicate` and DDP: gradients against exact means."""

from contextlib import nullcontext
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.exchange.names import plain_name
from gradwire.hooks.default_hooks import bf16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.sharded import ReduceScatterOptions
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks
from tests.support.sharded import FEATURES, Model, other_mesh, sharded, train
from tests.support.states import Ledger
from tests.support.training import SMALL, WRAPPERS

# Where a hook averages gradients, and whether the reduce-scatter is quantized.
PLACES = ["gradwire", "pytorch", "nodes", "replicate", "hsdp", "hsdp within", "hsdp both", "fsdp within"]
DDP = ("gradwire", "pytorch", "nodes")


def hook_of(place, wire):
    """State and hook that compress like this from the first step that they may on."""
    if wire == "bf16":
        return None, bf16_compress_hook
    if wire == "powersgd":
        return PowerSGDState(None, 4, start_powerSGD_iter=2, min_compression_rate=1), None
    exact = {"wires": {"*": "fp32"}} if wire == "fp32" else {"wire": wire}
    local_size = 2 if place == "nodes" else 1
    return QuantizationState(None, **exact, block_size=32, start_iter=0, exempt=(), local_size=local_size), None


def attached(place, model, wire):
    """Compress the gradients of a model in a place of `PLACES`."""
    within = None
    if place.endswith(("within", "both")):
        within = ReduceScatterOptions(wire=wire, block_size=32, exempt=(), error_dtype=torch.float32)
    return gradwire.attach(model, *(() if place.endswith("within") else hook_of(place, wire)), within=within)


# --- gradients against exact means


SHAPES = {  # with tied weights and rows that the shards do not divide, all of them
    "plain": {},
    "frozen": FEATURES["frozen"],
    "checkpointed": FEATURES["checkpointed"],
    "compiled": {"prepare": lambda model: model.spare.compile(backend="aot_eager")},
    "unused layer": {},
    "unused layer of one group": {"layers": ()},
    "accumulated": {},
    "meta device": FEATURES["meta device"],
    "two groups of a module": {"layers": (), "shard_placement_fn": other_mesh},
    "columns": FEATURES["columns"],
    "bf16 parameters": FEATURES["bf16 reduction"],
    "bf16 gradients": FEATURES["bf16 wire"],
}
ON_DDP = list(SHAPES)[:7]  # the rest is particular to FSDP2


def built(place, shape):
    """A model in a place, before a hook is attached."""
    if place not in DDP:
        return sharded(place.split()[0], **SHAPES[shape])
    torch.manual_seed(0)
    model = Model()
    SHAPES[shape].get("prepare", lambda _: None)(model)
    wrapper = WRAPPERS["pytorch" if place == "pytorch" else "gradwire"]
    return wrapper(model, bucket_cap_mb=SMALL, find_unused_parameters=shape.startswith("unused"))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def parameters(model):
    return {plain_name(name).removeprefix("module."): each for name, each in model.named_parameters()}


class Exact:
    """A copy of a model on each rank, without any wrapper, and the `Ledger` of what it and the model have computed."""

    def __init__(self, model, shape):
        self.model, self.shape = model, shape
        policy = SHAPES[shape].get("mp_policy")
        self.dtype = (policy and policy.param_dtype) or torch.float32
        self.local = Model()
        if "tied.weight" in parameters(model):  # moved to the meta device, which unties
            self.local.tied = nn.Linear(16, 16, bias=False)
        self.local.to(self.dtype)
        for name, each in self.local.named_parameters():
            each.requires_grad_(parameters(model)[name].requires_grad)
        self.ledger = Ledger(self.local)

    def step(self, number):
        """One step of both, from the parameters of the model; returns their gradients by name."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        batches = [torch.randn(5, 9, generator=generator) for _ in range(3 if self.shape == "accumulated" else 1)]
        used = {"spare": False} if self.shape.startswith("unused") and number % 2 else {}
        self.model.zero_grad()
        self.local.zero_grad()
        with torch.no_grad():
            for name, each in self.local.named_parameters():
                each.copy_(whole(parameters(self.model)[name]))
        for batch in batches:
            with self._micro_batch(batch is batches[-1]):
                self.model(batch, **used).float().square().mean().backward()
            self.local(batch.to(self.dtype), **used).float().square().mean().backward()
        own = {name: each.grad for name, each in self.local.named_parameters()}
        applied = {
            name: each.grad if each.grad is None else whole(each.grad) for name, each in parameters(self.model).items()
        }
        self.ledger.add(own, applied)
        return own, applied

    def _micro_batch(self, is_last):
        if hasattr(self.model, "no_sync"):
            return nullcontext() if is_last else self.model.no_sync()
        self.model.set_requires_gradient_sync(is_last)
        return nullcontext()


class Whole:
    """The errors of an attachment in the shapes of the gradients."""

    def __init__(self, attachment):
        self.attachment = attachment

    def state_dict(self):
        saved = self.attachment.state_dict() if self.attachment._groups else self.attachment.state.state_dict()
        found = {place: saved.get(entry) for place, entry in (("between", "errors"), ("within", "within"))}
        return {
            place: {"errors": {name: whole(error) for name, error in errors.items()}}
            for place, errors in found.items()
            if errors is not None
        }


EXACT = [
    (place, shape, wire)
    for place in PLACES
    for shape in (ON_DDP if place in DDP else SHAPES)
    for wire in ("fp32", "int4", "powersgd")
    if not (wire == "powersgd" and place in ("nodes", "hsdp within", "hsdp both", "fsdp within"))
    if not (place == "replicate" and shape in ("two groups of a module", "columns"))
    if not (place == "pytorch" and shape.startswith("unused") and wire != "fp32")  # it drops their results
]
_rotated = {shape: place for shape, place in zip(SHAPES, cycle(("hsdp both", "fsdp within", "nodes", "replicate")))}
QUICK = [
    case
    for case in EXACT
    if (case[1] == "plain" and case[2] == "fp32") or (_rotated[case[1]] == case[0] and case[2] == "int4")
]


@pytest.mark.parametrize(
    ("place", "shape", "wire"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in EXACT],
)
@on_ranks(4)
def test_gradients_and_errors_sum_to_the_exact_means(place, shape, wire):
    model = built(place, shape)
    attachment = attached(place, model, wire)
    exact = Exact(model, shape)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for number in range(5):
        exact.step(number)
        optimizer.step()
    # A reduce-scatter of some parameters of a group only is in bf16, without feedback.
    is_in_bf16 = shape == "bf16 gradients" or (
        shape == "unused layer of one group" and place.endswith(("within", "both"))
    )
    precision = 2.0**-8 if is_in_bf16 else 2.0**-24
    saved = Whole(attachment).state_dict()
    assert saved
    assert exact.ledger.close(Whole(attachment), precision) == []
    assert wire == "fp32" or all(any(map(torch.any, entry["errors"].values())) for entry in saved.values())


# Two fp32 numbers have one sum, and half of it is exact: the gradients of two shards and of two replicas have no other
# bits than PyTorch's. Among four ranks the order of additions differs, and the bound is that of `Ledger`.
@pytest.mark.parametrize(
    ("place", "wire", "feature"),
    [
        ("hsdp", "fp32", "plain"),
        ("hsdp within", "fp32", "plain"),
        ("hsdp both", "fp32", "plain"),
        ("hsdp both", "fp32", "bf16 reduction"),
        ("hsdp within", "bf16", "bf16 wire"),
    ],
)
@on_ranks(4)
def test_exact_wire_on_two_shards_of_two_replicas_has_the_native_bits(place, wire, feature):
    native, ours = (sharded("hsdp", **FEATURES[feature]) for _ in range(2))
    if place == "hsdp within":  # without error feedback
        gradwire.attach(ours, within=wire)
    else:
        attached(place, ours, wire)
    assert_same_bits(train(ours), train(native))
