"""Quantized exchange on nodes of several ranks: where nodes are found, the laws, bytes, faults and other node sizes."""

import copy
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import transport
from gradwire.comm.connections import executor_for
from gradwire.comm.nodes import local_size
from gradwire.hooks.default_hooks import CastState, bf16_compress_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.testing import check_laws
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import Ledger, Training
from tests.support.training import SMALL, WRAPPERS, build, gradients, own_batches, register, train_steps

CPU = torch.device("cpu")
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


def state_of(wire="int4", *, group=None, **options):
    return QuantizationState(group, wire, **({"block_size": 32, "start_iter": 0, "local_size": 2} | options))


# --- which ranks share a node


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", 1),
        ("aa", 1),  # one node
        ("ab", 1),
        ("aabb", 2),
        ("aaabbbccc", 3),
        ("aab", 1),  # nodes differ in size
        ("abb", 1),
        ("aabbb", 1),
        ("abab", 1),  # ranks of a node are not consecutive
        ("aabbaa", 1),
        ("abba", 1),
    ],
)
def test_nodes_have_equally_many_consecutive_ranks(nodes, expected):
    assert local_size(list(nodes)) == expected


@pytest.mark.parametrize(
    ("host", "node"), [("host {}", None), ("host", "{}")], ids=["host name", "torchrun's number of the node"]
)
@on_ranks(4)
def test_ranks_find_their_nodes(host, node):
    place = dist.get_rank() // 2
    variables = {} if node is None else {"GROUP_RANK": node.format(place)}
    with mock.patch.dict("os.environ", variables), mock.patch("socket.gethostname", lambda: host.format(place)):
        found = executor_for(dist.new_group(backend="gloo"), CPU).transport.local_size
    assert found == 2
    assert executor_for(dist.new_group(backend="gloo"), CPU).transport.local_size == 1


@wrappers
@on_ranks(4)
def test_nodes_must_have_equally_many_ranks(wrapper):
    ddp = WRAPPERS[wrapper](build("mlp"))
    register(ddp, (state_of(local_size=3), quantization_hook))
    with pytest.raises(Exception, match=r"local_size is 3, but 4 ranks exchange gradients; expected a divisor"):
        ddp(*ddp.module.batch(torch.Generator())).backward()


# --- laws


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"wire": "int8"}, marks=pytest.mark.slow),
        pytest.param({"use_error_feedback": False, "wire": "fp8"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_laws_hold_on_nodes(options):
    check_laws(partial(state_of, **options), quantization_hook, world_sizes=(4, 2), max_examples=4)


def test_laws_hold_on_nodes_in_16_bits_with_sums_in_fp32():
    check_laws(
        partial(CastState, accumulate="fp32", local_size=2), bf16_compress_hook, world_sizes=(4,), max_examples=4
    )


@wrappers
@on_ranks(4)
def test_nothing_is_lost_when_the_number_of_ranks_on_a_node_changes(wrapper):
    state, local, generator = state_of(), build("mlp"), own_batches()
    ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, (state, quantization_hook))
    ledger = Ledger(local)
    for size in (2, 1, 2, 4, 1):
        state.options = replace(state.options, local_size=size)
        for _ in range(2):
            ledger.step(ddp, local, local.batch(generator))
        assert copy.deepcopy(ledger).close(state) == []
        assert all(error.any() for name, error in state.state_dict()["errors"].items() if name.endswith("weight"))


@pytest.mark.parametrize("pieces", [2, 3])
@on_ranks(4)
def test_nothing_is_lost_in_messages_between_nodes_that_are_cut_into_pieces(pieces):
    """A block is quantized at another rank than in a whole message, and adds the errors of its mean there."""
    state, local, generator = state_of(exempt=(), wires={"*.bias": "int8"}), build("mlp"), own_batches()
    ledger = Ledger(local)
    with mock.patch.object(transport, "pieces_on_gloo", lambda *_: pieces):
        ddp = WRAPPERS["gradwire"](build("mlp"), process_group=dist.new_group(backend="gloo"), bucket_cap_mb=100)
        register(ddp, (state, quantization_hook))
        for _ in range(4):
            ledger.step(ddp, local, local.batch(generator))
            assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))
    ((_, bucket),) = state.memory._made()
    assert bucket.shard.message_layout.pieces == pieces
    assert copy.deepcopy(ledger).close(state) == []
    # As far from the mean gradients as whole messages: the errors are those of rounding.
    errors = state.state_dict()["errors"]
    assert all(error.abs().max() < 0.2 * ledger.size[name].max() for name, error in errors.items())


@on_ranks(4)
def test_nothing_is_lost_or_doubled_when_a_node_hands_its_errors_over_anew():
    """As after a gradient that was sent and not applied, here zeros: errors of both shots go to their shards again."""
    state, local, generator = state_of(), build("mlp"), own_batches()
    ledger, ddp = Ledger(local), WRAPPERS["gradwire"](build("mlp"))
    register(ddp, (state, quantization_hook))
    for _ in range(3):
        for _ in range(2):
            ledger.step(ddp, local, local.batch(generator))
        assert all(state.memory.take_back(name, torch.zeros_like(each)) for name, each in local.named_parameters())
    ledger.step(ddp, local, local.batch(generator))
    assert copy.deepcopy(ledger).close(state) == []


@on_ranks(4)
def test_checkpoint_of_nodes_resumes_without_nodes_and_on_others():
    sizes = (2, 1, 4, 2)
    before, saved = None, None
    for size in sizes:
        state = state_of(local_size=size)
        training = Training((state, quantization_hook), bucket_cap_mb=SMALL, load=saved)
        if before is not None:
            after = state.state_dict()["errors"]
            assert all(torch.allclose(after[name], error, rtol=1e-6, atol=1e-9) for name, error in before.items())
        training.run(2)
        saved = state.state_dict()
        before = saved["errors"]
        assert any(error.any() for error in before.values())
        assert_same_on_all_ranks(from_all_ranks(saved))


# --- numbers and bytes


@on_ranks(4)
def test_rank_on_a_node_sends_its_shard_to_other_nodes():
    sent, errors = {}, {}
    for size in (1, 2, 4):
        state = state_of(local_size=size)
        training = Training(
            (state, quantization_hook), group=dist.new_group(backend="gloo"), model="transformer", bucket_cap_mb=25
        )
        training.run(2)
        used = executor_for(state.process_group, CPU).transport
        before = used.payload_bytes
        training.run(1)
        sent[size] = used.payload_bytes - before
        errors[size] = state.error_memory_bytes
    # Up to the blocks that a last cell lacks.
    assert sent[2] == pytest.approx(sent[1] / 2, rel=0.05)
    assert sent[4] == pytest.approx(sent[1] / 4, rel=0.05)
    assert errors[2] == pytest.approx(errors[1] * 0.75 / 1.25, rel=0.05)  # (1 + 1 / nodes) / ranks on a node
    assert errors[4] == pytest.approx(errors[1] * 0.5 / 1.25, rel=0.05)


# --- inf and NaN


@on_ranks(4)
def test_errors_of_every_place_on_a_node_stay_if_one_gradient_is_not_finite():
    ddp, generator = WRAPPERS["gradwire"](build("mlp"), bucket_cap_mb=100), own_batches()
    state = register(ddp, (state_of(), quantization_hook))
    train_steps(ddp, 3, generator)
    before = [error.clone() for error in state.memory.residuals()]
    assert all(error.any() for error in before)

    def spoil(gradient):
        gradient = gradient.clone()
        gradient[0, 0] = torch.inf
        return gradient

    hook = ddp.module.layers[0].weight.register_hook(spoil if dist.get_rank() == 3 else lambda gradient: gradient)
    (found,) = train_steps(ddp, 1, generator)
    assert found["layers.0.weight"][0, 0].isnan()
    assert_same_bits(state.memory.residuals(), before)
    hook.remove()
    train_steps(ddp, 1, generator)
    assert all(not torch.equal(*pair) for pair in zip(state.memory.residuals(), before, strict=True))
