"""The benches on two ranks: a hook whose gradients are wrong is refused before anything is timed or reported."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.bench import contenders, converge, hook_cost, network, reducer
from gradwire.bench.contenders import GRADWIRE, PYTORCH
from gradwire.bench.hooks import HOOKS, HookEntry, Peer
from gradwire.bench.network import LOOPBACK
from gradwire.bench.tasks import TASKS

CPU = torch.device("cpu")


def keeps_its_own(buffer):
    return buffer


def sums(buffer):
    dist.all_reduce(buffer)
    return buffer


def differs_on_rank_1(buffer):
    """The mean, one of whose elements is the next larger number on one rank."""
    mean = sums(buffer) / dist.get_world_size()
    if dist.get_rank() == 1:
        mean[0] = torch.nextafter(mean[0], torch.tensor(float("inf")))
    return mean


def has_a_nan(buffer):
    mean = sums(buffer) / dist.get_world_size()
    mean[0] = float("nan")
    return mean


DEFECTS = {defect.__name__: defect for defect in (keeps_its_own, sums, differs_on_rank_1, has_a_nan)}


def planted(defect):
    def hook(_, bucket):
        future = torch.futures.Future()
        future.set_result(DEFECTS[defect](bucket.buffer().clone()))
        return future

    return hook


def entry(defect, provider):
    """The entry of fp16_compress_hook with a defect in gradwire's hook or in PyTorch's."""
    wrong = lambda group, start: (None, planted(defect))  # noqa: E731
    right = HOOKS["fp16"]
    peer = Peer(name=right.peer.name, make=wrong if provider == PYTORCH else right.peer.make)
    return HookEntry(
        description="wrong", make=wrong if provider == GRADWIRE else right.make, wire=right.wire, peer=peer
    )


def refusal(work):
    """The message with which ``work`` is refused."""
    with pytest.raises(RuntimeError) as error:
        work()
    return str(error.value)


SMALL = {"LAYERS": 2, "NARROW": 32, "WIDE": 64}


def network_bench(defect, provider):
    with mock.patch.dict(HOOKS, fp16=entry(defect, provider)), mock.patch.multiple(contenders, **SMALL):
        made = network.make_contenders(["fp16"], CPU)
        with mock.patch.object(network, "_probe") as first_that_is_timed:
            message = refusal(lambda: network.time_steps(made, [LOOPBACK], steps=1, hosts=2, is_emulated=False))
    assert not first_that_is_timed.called and not any(contender.seconds for contender in made)
    return message


def hooks_bench(defect, provider):
    with (
        mock.patch.dict(HOOKS, fp16=entry(defect, provider)),
        mock.patch.multiple(contenders, **SMALL),
        mock.patch.object(hook_cost, "track", None),  # of the timed steps
    ):
        return refusal(lambda: hook_cost._round("fp16", 1, CPU))


def reducer_bench(defect, provider):
    name = f"{provider}, fp16_compress_hook"
    wrong = {name: (reducer.PROVIDERS[name][0], planted(defect))}
    with mock.patch.dict(reducer.PROVIDERS, wrong), mock.patch.object(reducer, "track", None):
        return refusal(lambda: reducer._time("tiny-layers", 1, CPU))


def converge_bench(defect, provider):
    task = TASKS["digits"]()
    with mock.patch.dict(converge.RACED, fp16=entry(defect, provider)):
        racer = converge.Racer.make(task, "fp16", provider, seed=0, counts_bytes=False)
    for _, batch in zip(range(2), task.batches(0), strict=False):
        racer.step(batch)
    racer.look()
    return refusal(lambda: racer.race(0))


@pytest.mark.parametrize("provider", [PYTORCH, GRADWIRE])
@pytest.mark.parametrize(
    ("bench", "defect"),
    [
        *((bench, defect) for bench in (network_bench, hooks_bench) for defect in DEFECTS),
        # The reducers' own sums may differ in their last bits, so that bench compares to a tolerance.
        *((reducer_bench, defect) for defect in ("keeps_its_own", "sums", "has_a_nan")),
        # It compares weights: what a step makes of a gradient's last bit may be nothing.
        (converge_bench, "keeps_its_own"),
    ],
)
def test_bench_refuses_a_wrong_hook(worlds, bench, defect, provider):
    for message in worlds(2).run(bench, defect=defect, provider=provider):
        assert "fp16" in message and provider in message
        assert message.endswith(("nothing is timed.", "nothing is reported."))
