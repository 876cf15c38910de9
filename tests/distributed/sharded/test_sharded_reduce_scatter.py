"""The quantized reduce-scatter of FSDP2 and HSDP: `gradwire.attach(model, within=...)`."""

import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire.hooks.default_hooks import bf16_compress_hook
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.sharded import ReduceScatterOptions, torch_internals
from gradwire.sharded.exchange import ShardedExchange
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    FEATURES,
    SHARDED,
    backward,
    contributions,
    gradients,
    mesh,
    missing_over,
    norm,
    sharded,
    shared_folder,
    train,
)
from tests.support.training import message_of

DIVISION = {  # FSDP2 then reduces with AVG, SUM, and, dividing before and after, SUM of fp16
    "average": ({}, None),
    "sum": ({}, lambda module: module.set_force_sum_reduction_for_comms(True)),
    "fp16": (FEATURES["fp16"], None),
    "fp16, divided by 6": (FEATURES["fp16"], lambda module: module.set_gradient_divide_factor(6.0)),
    "columns": (FEATURES["columns"], None),
}


def divided(place, division):
    """A sharded model that divides its gradients like this."""
    options, setting = DIVISION[division]
    model = sharded(place, **options)
    for module in model.modules():
        if setting is not None and isinstance(module, FSDPModule):
            setting(module)
    return model


@pytest.mark.parametrize("error_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("division", DIVISION)
@pytest.mark.parametrize("place", SHARDED)
@on_ranks(4)
def test_law1_of_the_reduce_scatter_over_steps(place, division, error_dtype):
    native, ours = divided(place, division), divided(place, division)
    options = ReduceScatterOptions(wire="int4", error_dtype=error_dtype, wires={"*.bias": "int4"})
    attachment = gradwire.attach(ours, within=options)
    total = missing_over(4, native, ours)
    saved = attachment.state_dict()["within"]
    missing = torch.cat([total[name].float().flatten() for name in saved])
    errors = torch.cat([each.to_local().flatten() for each in saved.values()])
    exact = norm([gradient.float() for gradient in gradients(native).values()])
    assert norm([missing]) > 1e-2 * exact
    # The rest is rounding: of fp32 sums, of errors to bf16 in 8 bits, and of fp16 gradients in 11 bits.
    rounding = 1e-5 if error_dtype == torch.float32 and not division.startswith("fp16") else 0.1
    assert norm([errors - missing]) <= rounding * norm([missing])
    bytes_of = sum(each.numel() for each in ours.parameters()) * error_dtype.itemsize
    assert attachment.within_error_bytes >= bytes_of  # padding included


# FSDP2 then reduces with AVG, SUM, or, with factors other than the number of shards, PREMUL_SUM, which gloo lacks.
@pytest.mark.parametrize("factor", [None, 1.0, 3.0, 4.0])
@pytest.mark.parametrize("feature", ["plain", "sum", "fp16"])
@pytest.mark.parametrize(("place", "wire"), [("fsdp", "bf16"), ("hsdp", "fp16"), ("replicate", None)])
@on_ranks(4)
def test_divided_gradients_are_those_of_models_that_are_not_sharded(place, wire, feature, factor):
    model = sharded(place, **FEATURES.get(feature, {}))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(feature == "sum")
    hook = None if place == "fsdp" else bf16_compress_hook
    gradwire.attach(model, None, hook, within=wire)
    exact = {name: each.sum(0) * 4 / (factor or 4) for name, each in contributions(model, 0).items()}
    if place == "replicate" and feature != "plain" and factor is not None:
        exact = {name: each / factor for name, each in exact.items()}  # PyTorch divides twice
    backward(model, 0)
    missing = [each.grad.full_tensor().double() - exact[name] for name, each in model.named_parameters()]
    # Each wire rounds every rank's gradient by half a unit in the last place, fp16 training some more.
    bound = (2**-8 if hook else 0) + {"bf16": 2**-8, "fp16": 2**-11, None: 0}[wire] + 2**-8 * (feature == "fp16")
    assert norm(missing) <= 2 * bound * norm(exact.values())


@on_ranks(4)
def test_nonfinite_gradient_in_one_wire_format_changes_no_errors_of_the_others():
    model = sharded("fsdp")
    attachment = gradwire.attach(model, within=ReduceScatterOptions(wire="int4"))  # vectors are sent in 16 bits
    backward(model, 0)
    before = copy.deepcopy(attachment.state_dict()["within"])
    model.zero_grad()

    def spoil(module, _):
        module.bias.register_hook(lambda gradient: gradient * torch.nan if dist.get_rank() == 1 else gradient)

    model.first.register_forward_pre_hook(spoil)
    backward(model, 1)
    found = gradients(model)
    assert not found["first.bias"].isfinite().any() and found["first.weight"].isfinite().all()
    after = attachment.state_dict()["within"]
    for name in ("first.weight", "first.bias"):  # of the same parameter group
        assert_same_bits(after[name].to_local(), before[name].to_local())


@on_ranks(4)
def test_reduce_scatter_with_a_missing_gradient_is_in_16_bits_and_keeps_its_errors():
    native, ours = sharded("fsdp"), sharded("fsdp")
    attachment = gradwire.attach(ours, within=ReduceScatterOptions(wire="int4"))
    backward(ours, 0)
    before = copy.deepcopy(attachment.state_dict()["within"])
    for model in (native, ours):
        model.zero_grad()
        model.second.register_forward_hook(lambda module, inputs, output: output.detach())
        backward(model, 1)
    got, exact = gradients(ours), gradients(native)
    assert got["between.weight"] is None
    for name in ("second.weight", "last.weight"):  # of the same parameter group
        assert norm([got[name] - exact[name]]) <= 2**-7 * norm([exact[name]])
    after = attachment.state_dict()["within"]
    for name in ("between.weight", "second.weight", "last.weight"):
        assert_same_bits(after[name].to_local(), before[name].to_local())
    assert not torch.equal(after["spare.weight"].to_local(), before["spare.weight"].to_local())


@on_ranks(4)
def test_gradients_of_several_dtypes_in_a_parameter_group_are_sent_in_16_bits():
    native, ours = sharded("fsdp"), sharded("fsdp")
    attachment = gradwire.attach(ours, within=ReduceScatterOptions(wire="int4"))

    def gradient_dtype(parameter):  # a stand-in for PyTorch 2.15, which then orders the flat tensor by dtype
        return torch.bfloat16 if parameter.sharded_param.dim() == 1 else torch.float32

    with mock.patch.object(torch_internals, "gradient_dtype", gradient_dtype):
        for model in (native, ours):
            backward(model, 0)
        missing = [gradients(ours)[name] - gradient for name, gradient in gradients(native).items()]
        assert norm(missing) <= 2**-7 * norm(gradients(native).values())
        saved = attachment.state_dict()
        assert not any(each.to_local().any() for each in saved["within"].values())
        attachment.load_state_dict(saved)


# Without a `reduce_dtype`, PyTorch reduces in `param_dtype` up to 2.14, and since 2.15 in the dtype of the parameters.
WITHOUT_REDUCE_DTYPE = {
    "none": {},
    "fp16 parameters": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
    "bf16 parameters": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "frozen parameters of another dtype": {"prepare": lambda model: frozen_in_bf16(model.first)},
}


def frozen_in_bf16(layer):
    layer.to(torch.bfloat16).requires_grad_(False)
    layer.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    layer.register_forward_hook(lambda _, args, output: output.float())


@pytest.mark.parametrize("policy", [*WITHOUT_REDUCE_DTYPE, "bf16 reduction", "bf16 wire", "fp16"])
@on_ranks(4)
def test_dtype_of_the_layouts_is_the_one_in_which_fsdp2_reduces(policy):
    layers = () if policy.startswith("frozen") else ("first",)
    model = sharded("fsdp", layers=layers, **(WITHOUT_REDUCE_DTYPE | FEATURES)[policy])
    expected, found = [], []
    for group in torch_internals.parameter_groups(model):
        native, dtype = group.reduce_scatter, group.reduced_dtype()

        def reduce(output_tensor, input_tensor, group, op, async_op=False, native=native, dtype=dtype):
            expected.append(dtype)
            found.append(input_tensor.dtype)
            return native(output_tensor, input_tensor, group, op, async_op)

        reduce.allocate = native.allocate
        group.replace_reduce_scatter(mock.Mock(side_effect=reduce, allocate=native.allocate))
    backward(model, 0)
    assert expected == found
    assert len(found) == 1 + len(layers)


class LaterParameter:
    """A parameter of FSDP2 as PyTorch 2.15 has it."""

    def __init__(self, dtype, gradient_dtype, policy):
        self.sharded_param, self.mp_policy = torch.empty(1, dtype=dtype), policy
        self.sharded_grad_dtype = gradient_dtype

    @property
    def unsharded_grad_dtype(self):
        """FSDP2's own answer, which it has from the first forward on."""
        raise AttributeError("reduce_dtype")


@pytest.mark.parametrize(
    ("reduce_dtype", "gradient_dtype", "expected"),
    [
        (None, torch.float32, torch.float32),
        (None, torch.bfloat16, torch.bfloat16),
        (None, None, torch.float16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_reduced_dtype_of_later_releases_follows_the_gradient(reduce_dtype, gradient_dtype, expected):
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=reduce_dtype)
    later = LaterParameter(torch.float32, gradient_dtype, policy)
    assert torch_internals.reduced_dtype(later) == expected


@pytest.mark.parametrize("feature", ["plain", "fp16", "fp16 parameters"])
@pytest.mark.parametrize(("saved_in", "loaded_in"), [("hsdp", "fsdp"), ("fsdp", "hsdp"), ("hsdp", "hsdp")])
@on_ranks(4)
def test_checkpoint_of_reduce_scatter_errors_loads_with_other_numbers_of_shards(saved_in, loaded_in, feature):
    options = ReduceScatterOptions(wire="int4", error_dtype=torch.float32)
    features = (FEATURES | WITHOUT_REDUCE_DTYPE)[feature]
    first = sharded(saved_in, **features)
    attachment = gradwire.attach(first, within=options)
    train(first, 3)
    saved = attachment.state_dict()
    path = shared_folder()
    checkpoint.save({"hook": saved}, checkpoint_id=path)
    native, second = (sharded(loaded_in, **features) for _ in range(2))
    again = gradwire.attach(second, within=options)
    loaded = {"hook": again.state_dict()}
    checkpoint.load(loaded, checkpoint_id=path)
    again.load_state_dict(loaded["hook"])
    exact = {name: error.full_tensor() for name, error in saved["within"].items()}
    for name, error in again.state_dict()["within"].items():  # before a step
        torch.testing.assert_close(error.full_tensor(), exact[name], atol=1e-9, rtol=1e-6)
    for model in (native, second):
        backward(model, 9)
    total, rest = {}, again.state_dict()["within"]
    for name, each in second.named_parameters():
        applied = each.grad.full_tensor() - dict(native.named_parameters())[name].grad.full_tensor()
        total[name] = applied + rest[name].full_tensor() - exact[name]  # zero, if nothing is lost
    # fp16 gradients of both models are rounded after each of three operations, to 11 bits.
    rounding = 0 if feature == "plain" else 6 * 2**-12
    bound = rounding * norm([each.grad.full_tensor() for each in native.parameters()])
    assert norm(exact.values()) > 2 * bound
    assert norm(total.values()) <= bound + 1e-5 * norm(exact.values())


@on_ranks(4)
def test_damaged_checkpoint_of_reduce_scatter_errors_raises_and_changes_nothing():
    model = sharded("hsdp")
    state = QuantizationState(wire="int4", start_iter=0)
    attachment = gradwire.attach(model, state, within=ReduceScatterOptions(wire="int4"))
    train(model, 2)
    saved = attachment.state_dict()
    assert set(saved) == {"iter", "errors", "within"}
    assert "no entry 'within'" in message_of(attachment.load_state_dict, {"iter": 2, "errors": saved["errors"]})
    name = "second.weight"
    for damaged in (torch.full_like(saved["within"][name].to_local(), torch.nan), torch.zeros(3)):
        within = {**saved["within"], name: damaged}
        assert "within['second.weight']" in message_of(attachment.load_state_dict, {**saved, "within": within})
    again = attachment.state_dict()
    for entry in ("errors", "within"):
        assert_same_bits(
            [each.to_local() for each in again[entry].values()], [each.to_local() for each in saved[entry].values()]
        )


@pytest.mark.parametrize("place", SHARDED)
@on_ranks(4)
def test_law1_holds_while_parameters_are_frozen_and_trained_again(place):
    # The flat tensor has other parameters then: errors must follow their parameters, not the flat tensors.
    native, ours = sharded(place), sharded(place)
    options = ReduceScatterOptions(wire="int4", error_dtype=torch.float32, wires={"*.bias": "int4"})
    attachment = gradwire.attach(ours, within=options)
    total = {}
    for step, is_frozen in enumerate([False, False, True, True, False, True, False]):
        for model in (native, ours):
            model.zero_grad()
            model.between.weight.requires_grad_(not is_frozen)
            backward(model, step)
        exact = gradients(native)
        for name, gradient in gradients(ours).items():
            if gradient is not None:
                total[name] = total.get(name, 0) + exact[name] - gradient
    for name, error in attachment.state_dict()["within"].items():
        torch.testing.assert_close(total[name], error.to_local(), atol=1e-6, rtol=0)
    assert norm(total.values()) > 1e-3


@on_ranks(4)
def test_rounding_is_independent_between_ranks_shards_and_steps():
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(64, 64, bias=False), mesh=mesh("fsdp"))
    attachment = gradwire.attach(model, within=ReduceScatterOptions(wire="int4", exempt=()))
    row = torch.full((1, 64), 2.3)
    row[0, 0] = 7.0  # the scale of every block is 1, so 2.3 becomes 2, and 0.3 one of two neighbors in bf16
    heads = []
    for _ in range(2):
        model(row).sum().backward()  # the same gradient on all ranks, the same rows in all shards
        saved = attachment.state_dict()
        errors = saved["within"]["weight"].full_tensor()[:, 1:]
        heads.append(4 * (errors - errors.min()) / (errors.max() - errors.min()))  # of four coins, one per rank
        torch.testing.assert_close(heads[-1].unique(), torch.arange(5.0), atol=0.1, rtol=0)
        assert heads[-1].var() < 1.3 * 0.25 * 4
        shards = heads[-1].chunk(4)
        assert all(not one.equal(other) for one, other in itertools.combinations(shards, 2))
        assert len(heads[-1].unique(dim=0)) > 60  # the rows of a shard, too
        saved["within"]["weight"].zero_()
        attachment.load_state_dict(saved)  # the next step starts from the same errors
        model.zero_grad()
    correlation = torch.corrcoef(torch.stack([each.flatten() for each in heads]))[0, 1]
    assert correlation.abs() < 5 / heads[0].numel() ** 0.5


@on_ranks(4)
def test_results_of_several_reductions_return_to_the_errors_with_the_scale_of_each():
    model, kept, outputs = sharded("fsdp"), [], []
    gradwire.attach(model, within=ReduceScatterOptions(wire="int4", error_dtype=torch.float32, exempt=()))
    backward(model, 0)
    group = next(torch_internals.parameter_groups(model))
    sizes, scatter = group.flat_order(), group.reduce_scatter
    with mock.patch.object(ShardedExchange, "keep_result", lambda self, parameters, take_back: kept.append(take_back)):
        for operation in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            outputs.append(torch.empty(sum(map(torch.Size.numel, sizes.values()))))
            scatter(outputs[-1], torch.ones(4 * len(outputs[-1])), group.shards, operation)
    for take_back, output, scale in zip(kept, outputs, (1 / 4, 1), strict=True):
        before = {name: errors[dist.get_rank()].clone() for name, errors in scatter._errors.items()}
        take_back()
        for name, part in zip(sizes, output.split(list(map(torch.Size.numel, sizes.values()))), strict=True):
            assert_same_bits(scatter._errors[name][dist.get_rank()], before[name] + part / scale)
