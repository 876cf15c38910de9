"""Benches on two ranks refuse a hook with wrong gradients before they time or report anything."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.bench import converge, demo, implementations, network, reducer
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.namespaces import LOOPBACK
from gradwire.bench.tasks import TASKS, TRAINED_HOOKS, Digits, Training
from gradwire.planner.hook_registry import HOOKS, HookEntry, PyTorchHook
from tests.support.ranks import on_ranks
from tests.support.training import error_of

CPU = torch.device("cpu")


def keeps_local(buffer):
    return buffer


def sums(buffer):
    dist.all_reduce(buffer)
    return buffer


def differs_on_rank_1(buffer):
    """The mean, with the next larger number in one element on one rank."""
    mean = sums(buffer) / dist.get_world_size()
    if dist.get_rank() == 1:
        mean[0] = torch.nextafter(mean[0], torch.tensor(float("inf")))
    return mean


def has_a_nan(buffer):
    mean = sums(buffer) / dist.get_world_size()
    mean[0] = float("nan")
    return mean


DEFECTS = {defect.__name__: defect for defect in (keeps_local, sums, differs_on_rank_1, has_a_nan)}


def planted(defect):
    def hook(_, bucket):
        future = torch.futures.Future()
        future.set_result(DEFECTS[defect](bucket.buffer().clone()))
        return future

    return hook


def entry(defect, implementation):
    """The entry of fp16_compress_hook with a defect in gradwire's hook or in PyTorch's."""
    wrong = lambda group, start: (None, planted(defect))  # noqa: E731
    right = HOOKS["fp16"]
    pytorch = PyTorchHook(make=wrong if implementation == PYTORCH else right.pytorch.make)
    ours = wrong if implementation == GRADWIRE else right.make
    return HookEntry(description="wrong", make=ours, wire=right.wire, pytorch=pytorch)


def refusal(work):
    """The message of the error that ``work`` raises."""
    with pytest.raises(RuntimeError) as error:
        work()
    return str(error.value)


SMALL = {"LAYERS": 2, "NARROW": 32, "WIDE": 64}


def network_bench(defect, implementation):
    with mock.patch.dict(HOOKS, fp16=entry(defect, implementation)), mock.patch.multiple(implementations, **SMALL):
        made = network.make_implementations(["fp16"], CPU)
        with mock.patch.object(network, "_probe") as first_that_is_timed:
            message = refusal(lambda: network.time_steps(made, [LOOPBACK], steps=1, hosts=2))
    assert not first_that_is_timed.called and not any(one.seconds for one in made)
    return message


def reducer_bench(defect, implementation):
    with mock.patch.dict(HOOKS, fp16=entry(defect, implementation)), mock.patch.object(reducer, "turns", None):
        return refusal(lambda: reducer.time_backwards("tiny-layers", 1, CPU))


def converge_bench(defect, implementation):
    task = TASKS["digits"]()
    with mock.patch.dict(TRAINED_HOOKS, fp16=entry(defect, implementation)):
        training = converge.Trial(task, "sgd", "fp16", implementation, seed=0, counts_bytes=False)
    for _, batch in zip(range(2), task.batches(0, dist.get_rank(), dist.get_world_size()), strict=False):
        training.step(batch)
    training.is_over()
    return refusal(training.records)


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        (None, None),
        ("weight", "fp16, gradwire: the ranks ended with different weights; nothing is reported."),
        ("loss", "The training loss is not finite."),
    ],
)
@on_ranks(2)
def test_demo_refuses_a_training_that_went_wrong_on_one_rank(defect, message):
    expected = None if message is None else ("RuntimeError", message)
    training = Training(Digits(), "fp16", GRADWIRE, seed=0, start=2)
    training.step((torch.rand(8, 1, 8, 8), torch.arange(8)))
    if dist.get_rank() == 1 and defect == "weight":
        with torch.no_grad():
            weight = next(training.model.parameters()).view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(float("inf")))
    if dist.get_rank() == 1 and defect == "loss":
        training.losses[-1] = float("nan")
    assert error_of(lambda: demo.records_of_training(training, epochs=1)) == expected


@pytest.mark.parametrize("implementation", [PYTORCH, GRADWIRE])
@pytest.mark.parametrize(
    ("bench", "defect"),
    [
        *((network_bench, defect) for defect in DEFECTS),
        # This bench compares to a tolerance, because reducers' sums may differ in their last bits.
        *((reducer_bench, defect) for defect in ("keeps_local", "sums", "has_a_nan")),
        # This bench compares weights: the last bit of a gradient may not change them.
        (converge_bench, "keeps_local"),
    ],
)
def test_bench_refuses_wrong_hook(worlds, bench, defect, implementation):
    for message in worlds(2).run(bench, defect=defect, implementation=implementation):
        assert "fp16" in message and implementation in message
        assert message.endswith(("nothing is timed.", "nothing is reported."))
