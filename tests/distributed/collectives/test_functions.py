"""`gradwire.collectives`: means within the error of the format, equal on all ranks, with memory nothing is lost."""

import gc
import re
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire import collectives
from gradwire.collectives import Memory, all_reduce, all_reduce_coalesced, calls, reduce_scatter_tensor
from gradwire.collectives.calls import calls_on
from gradwire.comm import Connections, connections_of
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.rehearsal import gpu_on_cpu, register_backend

SHAPES = [(300,), (17, 33), (5, 4, 3)]
LARGEST_ERRORS = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 1e-3, "int8": 1.5e-2, "int6": 6e-2}
SUMMED_BY_GLOO = ("fp32", "fp16")  # in an order that depends on an element's place in the message


def tensors_of(step, dtype=torch.float32):
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]


def exact_sums(tensors):
    sums = [tensor.double() for tensor in tensors]
    for each in sums:
        dist.all_reduce(each)
    return sums


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("wire", LARGEST_ERRORS)
@on_ranks(2, 4)
def test_means_and_sums_are_within_the_error_of_the_format_and_equal_on_all_ranks(wire):
    size = dist.get_world_size()
    for step, (op, divisor) in enumerate([(dist.ReduceOp.AVG, size), (dist.ReduceOp.SUM, 1)]):
        tensors = tensors_of(step)
        tensors[1] = tensors[1].t()  # strides of its own
        expected = exact_sums(tensors)
        single = tensors[0].clone()
        all_reduce(single, op, wire=wire)
        all_reduce_coalesced(tensors, op, wire=wire)
        assert_same_on_all_ranks(from_all_ranks([single, *tensors]))
        if size == 2 or wire not in SUMMED_BY_GLOO:
            assert_same_bits(single, tensors[0])
        for found, sums in zip(tensors, expected, strict=True):
            assert relative_error(found, sums / divisor) <= LARGEST_ERRORS[wire]


@on_ranks(2)
def test_full_precision_has_the_bits_of_the_plain_mean():
    (own, *_), plain = tensors_of(0), tensors_of(0)[0] / dist.get_world_size()
    all_reduce(own, wire="fp32")
    dist.all_reduce(plain)
    assert_same_bits(own, plain)


@pytest.mark.parametrize(
    ("wire", "dtype"), [("int4", torch.float32), ("sign", torch.float32), ("int4", torch.bfloat16)]
)
@on_ranks(2)
def test_memory_keeps_what_a_format_loses(wire, dtype):
    memory, n_steps = Memory(error_dtype=torch.float32), 40
    applied = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    exact = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(n_steps):
        tensors = tensors_of(step, dtype)
        sums = exact_sums(tensors)
        all_reduce_coalesced(tensors, wire=wire, memory=memory["a", "b", "c"])
        for i, (tensor, total) in enumerate(zip(tensors, sums, strict=True)):
            applied[i] += tensor
            exact[i] += total / dist.get_world_size()
    (errors,) = [saved["errors"] for saved in memory.state_dict().values()]
    assert memory.nbytes > 0
    for i, name in enumerate("abc"):
        left = exact[i] - applied[i]
        rounding = 0.0 if dtype == torch.float32 else n_steps * 2**-9 * float(exact[i].abs().max())
        assert torch.allclose(left, errors[name].double(), atol=1e-4 + rounding, rtol=1e-3), name


@on_ranks(2)
def test_saved_memory_continues_with_the_same_bits():
    memory = Memory()
    for step in range(3):
        all_reduce(tensors_of(step)[1], wire="int4", memory=memory["weight"])
    saved = memory.state_dict()
    assert_same_on_all_ranks(from_all_ranks(saved))
    later = []
    for place in ("new", "used"):
        restored = Memory()
        if place == "used":
            all_reduce(tensors_of(9)[1], wire="int4", memory=restored["weight"])
        restored.load_state_dict(saved)
        later.append(tensors_of(3)[1])
        all_reduce(later[-1], wire="int4", memory=restored["weight"])
    assert_same_bits(*later)


@on_ranks(2)
def test_several_calls_in_flight_end_in_order():
    tensors = [each for step in range(3) for each in tensors_of(step)]  # three of each shape
    expected = [each.clone() for each in tensors]
    for each in expected:
        all_reduce(each, wire="int8")
    works = [all_reduce(each, async_op=True, wire="int8") for each in tensors]
    for work in works:
        assert work.wait()
        assert work.is_completed()
    assert_same_bits(tensors, expected)


@on_ranks(2)
def test_call_that_waits_for_an_earlier_one_raises_if_a_rank_has_left():
    collectives.resynchronize()  # forget other tests
    tensor = tensors_of(0)[0]
    all_reduce(tensor)
    (place,) = calls_on(connections_of(dist.group.WORLD))._compressors.values()
    place.in_flight = torch.futures.Future()
    left = mock.patch.object(Connections, "check_peers", side_effect=RuntimeError("Rank 7 has left"))
    with left, pytest.raises(RuntimeError, match="Rank 7 has left"):
        all_reduce(tensor)
    collectives.resynchronize()


@on_ranks(2)
def test_futures_of_calls_in_flight_have_the_results():
    tensors = tensors_of(0)
    source, output, expected = torch.cat([tensors[0]] * 2), torch.empty(300), torch.empty(300)
    sums = [tensor.clone() for tensor in tensors]
    for each in sums:
        all_reduce(each, dist.ReduceOp.SUM)
    reduce_scatter_tensor(expected, source)
    futures = [all_reduce(each, dist.ReduceOp.SUM, async_op=True).get_future() for each in tensors]
    futures.append(reduce_scatter_tensor(output, source, async_op=True).get_future())
    torch.futures.collect_all(futures).wait()
    assert_same_bits([*tensors, output], [*sums, expected])
    assert futures[0].value()[0].data_ptr() == tensors[0].data_ptr()


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
@on_ranks(2)
def test_nothing_keeps_the_tensors_of_a_call_that_has_ended(wire):
    memory = Memory() if wire == "int4" else None
    first, *others = tensors_of(0)
    source, output = torch.cat([first, first]), torch.empty(300)
    all_reduce(first, wire=wire, memory=memory and memory["first"])
    all_reduce_coalesced(others, wire=wire, memory=memory and memory["second", "third"])
    reduce_scatter_tensor(output, source, wire=wire, memory=memory and memory["scattered"])
    kept = [weakref.ref(each.untyped_storage()) for each in (first, *others, source, output)]
    del first, others, source, output
    for _ in range(20):  # then the threads that have exchanged them have gone on
        all_reduce(torch.ones(3), wire=wire)
    gc.collect()
    assert [each() is None for each in kept] == [True] * 5


@on_ranks(2)
def test_code_path_of_a_gpu_has_the_same_results():
    def reduced(group):
        memory, results = Memory(), []
        for step in range(3):
            tensors, source, output = tensors_of(step), torch.cat(tensors_of(step)[:1] * 2), torch.empty(300)
            works = [all_reduce(each, dist.ReduceOp.SUM, group, async_op=True) for each in tensors]
            works.append(reduce_scatter_tensor(output, source, group=group, async_op=True))
            for work in works[step:]:
                work.wait()
            torch.futures.collect_all([work.get_future() for work in works[:step]]).wait()
            all_reduce_coalesced(tensors, group=group, wire="int4", memory=memory["a", "b", "c"])
            reduce_scatter_tensor(output, source, group=group, wire="int4", memory=memory["scattered"])
            results += [*tensors, output]
        return results

    expected = reduced(dist.new_group())
    with gpu_on_cpu():
        assert_same_bits(reduced(dist.new_group(backend=register_backend())), expected)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int6"])
@on_ranks(2, 4)
def test_reduce_scatter_writes_the_part_of_this_rank(wire):
    size, rank = dist.get_world_size(), dist.get_rank()
    for step, (op, divisor) in enumerate([(dist.ReduceOp.AVG, size), (dist.ReduceOp.SUM, 1), (dist.ReduceOp.SUM, 1)]):
        draw = torch.Generator().manual_seed(10 * step + rank)
        source = torch.randn(size, 9, 11, generator=draw)
        kept, output = source.clone(), torch.empty(9, 11)
        (sums,) = exact_sums([source])
        work = reduce_scatter_tensor(output, source, op, async_op=step == 2, wire=wire)
        if work is not None:
            work.wait()
        assert relative_error(output, sums[rank] / divisor) <= LARGEST_ERRORS[wire]
        assert_same_bits(source, kept)


@pytest.mark.parametrize(("wire", "error_dtype"), [("int4", torch.float32), ("sign", torch.bfloat16)])
@on_ranks(2, 4)
def test_memory_keeps_what_a_reduce_scatter_loses(wire, error_dtype):
    size, memory = dist.get_world_size(), Memory(error_dtype=error_dtype)
    missing, total, before = torch.zeros(3, size, 99, dtype=torch.float64)
    for step in range(30):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        source, output = torch.randn(size, 99, generator=draw), torch.empty(99)
        (sums,) = exact_sums([source])
        reduce_scatter_tensor(output, source, wire=wire, memory=memory["weight"])
        dist.all_gather_into_tensor(parts := torch.empty(size * 99), output)
        after = memory.state_dict()["weight"]["errors"]["weight"].double().view(size, 99)
        # A step loses its own rounding: of fp32 sums, or of the errors, to neighbors at a distance of at most
        # 2^-7 of them; its standard deviation is at most half of that.
        lost = sums / size - parts.view(size, 99) + before - after
        assert lost.norm() <= (1e-6 if error_dtype == torch.float32 else 2**-8) * after.norm()
        missing, total, before = missing + sums / size - parts.view(size, 99), total + sums / size, after
    assert memory.nbytes >= size * 99 * error_dtype.itemsize
    assert float(missing.norm()) < float(total.norm())


@pytest.mark.parametrize("collective", [all_reduce, reduce_scatter_tensor], ids=lambda each: each.__name__)
@on_ranks(2)
def test_errors_in_bf16_add_up_values_smaller_than_the_distance_of_their_neighbors(collective):
    memory, n_steps, n_elements = Memory(error_dtype=torch.bfloat16), 200, 2 * 640
    distance = 2.0**-9  # of neighbors in bf16, from 0.25 to 0.5
    for step in range(1 + n_steps):
        source = torch.full((n_elements,), 0.25 if step == 0 else distance / 4)
        source[::64] = 8.0  # the scale of every block is 1, so all other elements are sent as 0
        written = [source] if collective is all_reduce else [torch.empty(n_elements // 2), source]
        collective(*written, wire="int4", memory=memory["weight"])
        assert_same_bits(written[0].view(-1, 64)[:, 1:].count_nonzero(), torch.tensor(0))
    errors = memory.state_dict()["weight"]["errors"]["weight"].double().view(-1, 64)  # the mean over the ranks
    assert not errors[:, 0].any()
    n_up = (errors[:, 1:] - 0.25) / distance  # of n_steps coins, heads with a probability of 1 / 4
    deviation = (n_steps * 1 / 4 * 3 / 4 / dist.get_world_size()) ** 0.5
    assert (n_up - n_steps / 4).abs().max() <= 5 * deviation
    assert n_up.unique().numel() > 10


@on_ranks(2)
def test_memory_of_a_reduce_scatter_continues_with_more_padding():
    def source_of(step, n_padded):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return torch.cat([torch.randn(190, generator=draw), torch.zeros(n_padded)])

    memory = Memory()
    for step in range(3):
        reduce_scatter_tensor(torch.empty(96), source_of(step, 2), wire="int4", memory=memory["weight"])
    saved = memory.state_dict()
    assert_same_on_all_ranks(from_all_ranks(saved))
    for n_padded in (0, 10):
        restored = Memory()
        restored.load_state_dict(saved)
        output = torch.empty((190 + n_padded) // 2)
        reduce_scatter_tensor(output, source_of(3, n_padded), wire="int4", memory=restored["weight"])
        assert restored.state_dict()["weight"]["iter"] == 4
    again = [Memory(), Memory()]
    for each in again:
        each.load_state_dict(saved)
    outputs = [torch.empty(96), torch.empty(96)]
    for each, output in zip(again, outputs, strict=True):
        reduce_scatter_tensor(output, source_of(3, 2), wire="int4", memory=each["weight"])
    assert_same_bits(*outputs)
    with pytest.raises(ValueError, match=r"errors\['weight'\] has 192 elements; expected 100, or only zeros"):
        restored = Memory()
        restored.load_state_dict(saved)
        reduce_scatter_tensor(torch.empty(50), source_of(3, 0)[:100], wire="int4", memory=restored["weight"])
    collectives.resynchronize()


@on_ranks(2)
def test_all_reduces_in_few_bits_without_memory_warn_once():
    with mock.patch.object(calls.logger, "warning") as warning:
        for step in range(2):
            all_reduce(tensors_of(step)[1], wire="int4")
            all_reduce(tensors_of(step)[1], wire="int6")
            all_reduce(tensors_of(step)[1], wire="int4", memory=Memory()["weight"])
            reduce_scatter_tensor(torch.empty(150), tensors_of(step)[0], wire="int4")
    ((text, wire, _),) = [call.args for call in warning.call_args_list]
    assert "without memory" in text and wire == "int4"


@pytest.mark.parametrize("problem", ["dtype", "wire", "shape", "known", "operation", "sum", "reduce-scatter"])
@on_ranks(2, 4)
def test_bad_input_on_one_rank_raises_on_all_and_loses_nothing(problem):
    tensors = tensors_of(0)
    all_reduce(tensors[0], wire="int8")
    is_bad, size = dist.get_rank() == 1, dist.get_world_size()
    if problem == "known":
        all_reduce(tensors[1].clone(), wire="int8")
    own = tensors[1].clone()
    bad = {
        "dtype": lambda: all_reduce(own.long(), wire="int8"),
        "wire": lambda: all_reduce(own, wire="int5"),
        "shape": lambda: all_reduce(own[:3], wire="int8"),
        "known": lambda: all_reduce(own[:5], wire="int8"),  # the other rank passes a known tensor
        "operation": lambda: all_reduce(own, dist.ReduceOp.MAX, wire="int8"),
        "sum": lambda: all_reduce(own, dist.ReduceOp.SUM, wire="int8"),
        "reduce-scatter": lambda: reduce_scatter_tensor(own[:3], own, wire="int8"),
    }[problem]
    good = (
        (lambda: reduce_scatter_tensor(own.view(-1)[: 560 // size].clone(), own.view(-1)[:560], wire="int8"))
        if (problem == "reduce-scatter")
        else (lambda: all_reduce(own, wire="int8"))
    )
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        bad() if is_bad else good()
    expected = {
        "shape": "differ between ranks|which is new",
        "known": "which is new, and rank",
        "sum": "op: AVG on ranks? .*; SUM on rank 1|which is new",
    }
    assert is_bad or re.search(expected.get(problem, "failed on rank 1"), str(error.value))
    assert_same_bits(own, tensors[1])
    with pytest.raises(RuntimeError):
        all_reduce(own, wire="int8")
    collectives.resynchronize()
    all_reduce(own, wire="int8")
    assert_same_on_all_ranks(from_all_ranks(own))


@on_ranks(2)
def test_names_of_memory_stand_for_one_tensor_each():
    memory, (first, second, _) = Memory(), tensors_of(0)
    with pytest.raises(TypeError, match="different names"):
        memory["a", "a"]
    all_reduce(first, wire="int4", memory=memory["a"])
    with pytest.raises(ValueError, match="used with other tensors"):
        all_reduce(second, wire="int4", memory=memory["a"])
    collectives.resynchronize()
    with pytest.raises(ValueError, match="another collective, operation"):
        all_reduce(first, dist.ReduceOp.SUM, wire="int4", memory=memory["a"])
    collectives.resynchronize()
    with pytest.raises(ValueError, match="keeps no errors"):
        all_reduce(second, wire="bf16", memory=memory["b"])
    collectives.resynchronize()
    with pytest.raises(TypeError, match="expected an entry of a Memory"):
        all_reduce(second, wire="int4", memory=memory)
    collectives.resynchronize()


@on_ranks(2)
def test_wrong_arguments_are_refused_with_the_remedy():
    tensor = tensors_of(0)[0]
    with pytest.raises(ValueError, match=r"op is 'int8'; expected .* Pass wire='int8'\."):
        all_reduce(tensor, "int8")
    with pytest.raises(RuntimeError, match=r"Call resynchronize\(\) of .* or of gradwire\.collectives"):
        all_reduce(tensor)
    collectives.resynchronize()
    op = [dist.ReduceOp.AVG, dist.ReduceOp.SUM][dist.get_rank()]
    with pytest.raises(RuntimeError, match="op: AVG on rank 0; SUM on rank 1"):
        reduce_scatter_tensor(torch.zeros(4), torch.ones(8), op)
    collectives.resynchronize()
    with pytest.raises(TypeError, match="Got one tensor; expected a list of tensors"):
        all_reduce_coalesced(tensor)
    collectives.resynchronize()


@on_ranks(2)
def test_memory_survives_an_error_and_goes_on_with_equal_bits():
    memory = Memory()
    for step in range(3):
        all_reduce(tensors_of(step)[1], wire="int4", memory=memory["weight"])
    kept = memory.state_dict()
    tensor = tensors_of(3)[1]
    with pytest.raises((TypeError, RuntimeError)):
        if dist.get_rank() == 0:
            all_reduce(tensor.long(), wire="int4", memory=memory["weight"])
        else:
            all_reduce(tensor, wire="int4", memory=memory["weight"])
    assert_same_bits(tensor, tensors_of(3)[1])
    collectives.resynchronize(None, memory)
    assert_same_bits(memory.state_dict()["weight"]["errors"], kept["weight"]["errors"])
    all_reduce(tensor, wire="int4", memory=memory["weight"])
    assert_same_on_all_ranks(from_all_ranks(tensor))
