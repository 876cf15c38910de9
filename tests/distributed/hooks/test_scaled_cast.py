"""`scaled_cast_hook`: the scales over the steps, and the content of a checkpoint."""

import warnings
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.telemetry import HostCopy
from gradwire.hooks import scaled_cast_hooks
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.states import save_and_load
from tests.support.training import SMALL, SMALLEST, WRAPPERS, gradients, register
from tests.support.zoo import Probe


@dataclass
class Step:
    """The reduced gradients of a step, and the scales and counters after it."""

    gradients: list
    exponents: dict
    nonfinite: int
    saturated: int
    skipped: int


def run_steps(values, wrapper="gradwire", options=None, **ddp_options):
    """One step for each of ``values``, whose gradient on rank r is the list of tensors ``values[step][r]``."""
    mine = [ranks[dist.get_rank()] for ranks in values]
    ddp = WRAPPERS[wrapper](Probe(*(tensor.shape for tensor in mine[0])), **ddp_options)
    state = register(ddp, (ScaledCastState(**(options or {})), scaled_cast_hook))
    steps = []
    for tensors in mine:
        ddp.zero_grad()
        ddp(*tensors).backward()
        reduced = list(gradients(ddp).values())
        counters = state.nonfinite_elements, state.saturated_elements, state.skipped_steps
        steps.append(Step(reduced, state.exponents(), *counters))
    return steps


def equal_on_all_ranks(world, *tensors):
    return [list(tensors)] * world.size


def relative_errors(results, values):
    """The largest relative error of each step, over all ranks and elements, against the exact mean."""
    errors = []
    for step, ranks in enumerate(values):
        worst = 0.0
        for index in range(len(ranks[0])):
            stacked = torch.stack([tensors[index].double() for tensors in ranks])
            scale = stacked.abs().mean(0)
            for result in results:
                worst = max(worst, ((result[step].gradients[index] - stacked.mean(0)).abs() / scale).max().item())
        errors.append(worst)
    return errors


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("magnitude", [1e-9, 1e-20, 1e-30])
def test_tiny_gradients_are_reduced_accurately(world, magnitude, wrapper):
    values = [equal_on_all_ranks(world, torch.full((5,), magnitude))] * 4
    results = world.run(run_steps, values=values, wrapper=wrapper)
    assert relative_errors(results, values)[-1] <= world.size * 2.0**-11


def random_gradients(world, seed, shapes=((31,), (5, 7), ()), binades=6):
    """Different on every rank, of both signs, within some binades below 1, so that nothing is subnormal on the wire."""
    generator = torch.Generator().manual_seed(seed)
    ranks = []
    for _ in range(world.size):
        tensors = []
        for shape in shapes:
            sign = torch.randint(2, shape, generator=generator) * 2 - 1
            tensors.append(sign * torch.exp2(-binades * torch.rand(shape, generator=generator)))
        ranks.append(tensors)
    return ranks


def scaled(ranks, factor):
    return [[tensor * factor for tensor in tensors] for tensors in ranks]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_law2_scales_are_equal_on_all_ranks(world, wrapper):
    # Different gradients on every rank, of different magnitudes, some of them saturating or not finite.
    values = []
    for step in range(12):
        ranks = random_gradients(world, step)
        factors = [2.0 ** ((7 * step * (rank + 1)) % 41 - 20) for rank in range(world.size)]
        values.append([[tensor * factor for tensor in tensors] for tensors, factor in zip(ranks, factors, strict=True)])
    values[6][0][1][2, 3] = torch.inf
    results = world.run(run_steps, values=values, wrapper=wrapper, bucket_cap_mb=SMALLEST)
    assert_same_on_all_ranks([[step.exponents for step in result] for result in results])
    assert_same_on_all_ranks([[step.gradients for step in result] for result in results])


@pytest.mark.parametrize("binades_a_step", [-1, 1, 2, 3])
def test_scale_follows_gradient_over_many_orders_of_magnitude(world, binades_a_step):
    # The scale rises by `growth` = 1 binade a step, so it keeps up with halving; `margin` = 4 lets it keep up with
    # larger steps upwards. 48 binades are more than 14 orders of magnitude.
    steps = 48 // abs(binades_a_step)
    start = 24 if binades_a_step < 0 else -24
    values = [scaled(random_gradients(world, 5), 2.0 ** (start + binades_a_step * step)) for step in range(steps)]
    results = world.run(run_steps, values=values, bucket_cap_mb=SMALL)
    assert max(relative_errors(results, values)) <= world.size * 2.0**-11 * (1 + 2.0**-8)
    assert all(result[-1].saturated == 0 for result in results)
    moved = [result[-1].exponents["weights.0"] - result[4].exponents["weights.0"] for result in results]
    assert moved == [-binades_a_step * (steps - 5)] * world.size


def test_scale_survives_steps_with_zero_gradients(world):
    # A bucket may be idle for long, as that of a frozen branch or of a warm-up: the first gradient after it saturates,
    # and the scale has to come back from there.
    nothing = scaled(random_gradients(world, 5), 0.0)
    values = [random_gradients(world, 5)] * 3 + [nothing] * 60 + [random_gradients(world, 5)] * 12
    results = world.run(run_steps, values=values)
    assert relative_errors(results, values[:3] + values[-1:] * 72)[-1] <= world.size * 2.0**-11 * (1 + 2.0**-8)
    assert all(torch.equal(g, torch.zeros_like(g)) for step in results[0][3:63] for g in step.gradients)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_steps_keep_scales_and_count_once(world, bad):
    culprit = world.size - 1
    values = [scaled(random_gradients(world, 5), 1.0) for _ in range(8)]
    for step in (4, 6):
        for tensor in values[step][culprit][:2]:  # two buckets of the same step
            tensor.view(-1)[:3] = bad
    results = world.run(run_steps, values=values, bucket_cap_mb=SMALLEST)
    for rank, steps in enumerate(results):
        assert [step.skipped for step in steps] == [0, 0, 0, 0, 1, 1, 2, 2]
        assert [step.nonfinite for step in steps] == ([0] * 4 + [6] * 2 + [12] * 2 if rank == culprit else [0] * 8)
        for step in (4, 6):
            assert steps[step].exponents == steps[step - 1].exponents
            assert not any(gradient.isfinite().all() for gradient in steps[step].gradients[:2])
        assert [step.saturated for step in steps] == [0] * 8
    assert relative_errors(results, values)[-1] <= world.size * 2.0**-11 * (1 + 2.0**-8)


def test_nonfinite_first_step_is_skipped(world):
    values = [random_gradients(world, 5) for _ in range(4)]
    values[0] = scaled(values[0], torch.inf)
    results = world.run(run_steps, values=values)
    assert [step.skipped for step in results[0]] == [1, 1, 1, 1]
    assert max(relative_errors(results, values)[1:]) <= world.size * 2.0**-11 * (1 + 2.0**-8)


def test_saturated_elements_count_on_their_rank_and_scale_recovers(world):
    # One rank's first tensor jumps by 20 binades, beyond what `margin` = 4 tolerates.
    jumped = random_gradients(world, 5)
    jumped[0] = [jumped[0][0] * 2.0**20, *jumped[0][1:]]
    values = [random_gradients(world, 5)] * 4 + [jumped] * 16
    results = world.run(run_steps, values=values)
    limit = 2.0**14  # of a contribution times its scale, on two ranks; less on more
    for rank, steps in enumerate(results):
        counts = [step.saturated for step in steps]
        assert counts[:4] == [0] * 4
        if rank == 0:
            at_once = (jumped[0][0].abs() / world.size * 2.0 ** steps[3].exponents["weights.0"] >= limit).sum().item()
            assert at_once > 0
            assert at_once <= counts[4] <= jumped[0][0].numel()
        else:
            assert counts[4] == 0
        assert counts[-1] == counts[-2], "no longer"
        assert [step.skipped for step in steps] == [0] * 20
    assert all(gradient.isfinite().all() for step in results[0] for gradient in step.gradients)
    last = [values[-1]] * len(values)
    first_tensor_only = [[[tensors[0]] for tensors in ranks] for ranks in last]
    assert relative_errors(results, first_tensor_only)[-1] <= world.size * 2.0**-11 * (1 + 2.0**-8)


def warnings_of_steps(ddp, scales):
    """The texts of the warnings in each step, in which one gradient is ``scales[step]``."""
    seen = []
    for scale in scales:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp.zero_grad()
            ddp(torch.full((31,), scale), torch.ones(5, 7)).backward()
        seen.append([str(warning.message) for warning in caught])
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, 3)
def test_rank_whose_elements_saturate_warns_once_with_their_number_and_the_remedy(wrapper):
    def steps(state, scales):
        ddp = WRAPPERS[wrapper](Probe((31,), (5, 7)), bucket_cap_mb=SMALLEST)
        register(ddp, (state, scaled_cast_hook))
        return warnings_of_steps(ddp, scales)

    # Rank 0's first gradient jumps twice, by more than the margin each time.
    jumps = dist.get_rank() == 0
    scales = [1.0, 1.0, 2.0**10, 2.0**10, 2.0**20, 2.0**20, 2.0**20] if jumps else [1.0] * 7
    state = ScaledCastState()
    seen = steps(state, scales)
    assert [len(texts) for texts in seen] == ([0, 0, 0, 1, 0, 0, 0] if jumps else [0] * 7)
    assert state.saturated_elements == (62 if jumps else 0)
    if jumps:
        assert seen[3][0].startswith(
            "scaled_cast_hook: 31 gradient elements saturated on this rank before step 3, so the means of their steps "
            "are too small. margin=4 lets gradients grow 16-fold from one step to the next. Raise it, up to 12, or use "
            "dtype=torch.bfloat16"
        )
    loaded = ScaledCastState()
    loaded.load_state_dict(state.state_dict())
    assert [len(texts) for texts in steps(loaded, [2.0**20] * 3)] == [0] * 3  # earlier ones, of another run
    saved = ScaledCastState()
    saved.load_state_dict(state.state_dict())
    further = [scales[-1], scales[-1], scales[-1] ** 2, 1.0]  # buckets are new, and agree, in the first two steps
    assert [len(texts) for texts in steps(saved, further)] == [0, 0, 0, int(jumps)]


@on_ranks(1)
def test_saturation_before_a_capture_is_reported_after_it():
    ddp = WRAPPERS["gradwire"](Probe((31,), (5, 7)))
    register(ddp, (ScaledCastState(), scaled_cast_hook))
    warnings_of_steps(ddp, [1.0, 1.0, 2.0**20])
    with (
        mock.patch.object(scaled_cast_hooks, "is_capturing", lambda device: True),
        mock.patch.object(HostCopy, "is_there", lambda copy: pytest.fail("queries an event in a capture")),
    ):
        assert warnings_of_steps(ddp, [2.0**20]) == [[]]
    assert len(*warnings_of_steps(ddp, [2.0**20])) == 1


def counts_around_resynchronization(from_rank):
    """This rank's counts before and after a resynchronization, and after a step that follows it; and then a warning.

    Counts differ between ranks, as after faults, and the step that failed had a non-finite gradient.
    """
    ddp = WRAPPERS["gradwire"](Probe((5,)))
    state = register(ddp, (ScaledCastState(), scaled_cast_hook))
    ddp(torch.ones(5)).backward()
    rank = dist.get_rank()
    state._counters.copy_(torch.tensor([10 + rank, 20 + rank, 30 + rank, 1]))
    seen = []
    for action in (lambda: None, lambda: ddp.resynchronize(from_rank), lambda: ddp(torch.ones(5)).backward()):
        action()
        seen.append((state.nonfinite_elements, state.saturated_elements, state.skipped_steps))
    with pytest.warns(UserWarning, match=f"{20 + rank} gradient elements saturated"):
        ddp(torch.ones(5)).backward()
    return seen


@pytest.mark.parametrize("from_rank", [None, 0, 1])
def test_resynchronization_keeps_element_counts_and_copies_skipped_steps(world, from_rank):
    results = world.run(counts_around_resynchronization, from_rank=from_rank)
    for rank, counts in enumerate(results):
        own, source = (10 + rank, 20 + rank), 30 + (from_rank or 0)
        assert counts == [(*own, 30 + rank), (*own, source), (*own, source)]


# --- checkpoints


def resume(values, first, second, cut):
    """Gradients and exponents of the steps after ``cut``, with and without a restart under other options."""
    mine = [ranks[dist.get_rank()] for ranks in values]

    def steps(state, wrapper, tensors, **ddp_options):
        module = Probe(*(tensor.shape for tensor in mine[0]))
        ddp = WRAPPERS[wrapper](module, **ddp_options)
        register(ddp, (state, scaled_cast_hook))
        seen = []
        for step in tensors:
            ddp.zero_grad()
            ddp(*step).backward()
            seen.append(gradients(ddp))
        return seen

    uninterrupted = steps(ScaledCastState(), first[0], mine, **first[1])[cut:]
    state = ScaledCastState()
    steps(state, first[0], mine[:cut], **first[1])
    saved = save_and_load(state.state_dict(), weights_only=True)
    state = ScaledCastState()
    state.load_state_dict(saved)
    loaded = state.exponents()
    resumed = steps(state, second[0], mine[cut:], **second[1])
    return uninterrupted, resumed, loaded, state.exponents()


RESUMPTIONS = {
    "same": (("gradwire", {"bucket_cap_mb": SMALLEST}), ("gradwire", {"bucket_cap_mb": SMALLEST})),
    "larger_buckets": (("gradwire", {"bucket_cap_mb": SMALLEST}), ("gradwire", {"bucket_cap_mb": 1})),
    "smaller_buckets": (("gradwire", {"bucket_cap_mb": 1}), ("gradwire", {"bucket_cap_mb": SMALLEST})),
    "views": (("gradwire", {}), ("gradwire", {"gradient_as_bucket_view": True})),
    "from_pytorch": (("pytorch", {"bucket_cap_mb": SMALLEST}), ("gradwire", {"bucket_cap_mb": SMALL})),
    "to_pytorch": (("gradwire", {"bucket_cap_mb": SMALLEST}), ("pytorch", {"bucket_cap_mb": SMALL})),
    "on_pytorch": (("pytorch", {"bucket_cap_mb": SMALLEST}), ("pytorch", {"bucket_cap_mb": SMALLEST})),
}


@on_ranks(2)
def test_one_rank_saves_alone_and_checkpoints_without_a_step_count_load():
    ddp, state = WRAPPERS["gradwire"](Probe((5,))), ScaledCastState()
    register(ddp, (state, scaled_cast_hook))
    ddp(torch.ones(5)).backward()
    if dist.get_rank() == 0:
        state.prepare_checkpoint()
        saved = state.state_dict()
        assert saved.pop("iter") == 1
        state.load_state_dict(saved)
        assert state.iter == 0


@pytest.mark.parametrize("resumption", RESUMPTIONS)
def test_law7_resumed_training_is_bitwise_equal_to_uninterrupted_run(worlds, resumption):
    # Scales are powers of two, so any scale that keeps a gradient normal on the wire gives the same bits; on two ranks,
    # where it does not matter to the sum in which order of buckets an element lies.
    first, second = RESUMPTIONS[resumption]
    shapes = ((13,), (3, 5), (7,), (2, 2, 2))
    values = [scaled(random_gradients(worlds(2), seed, shapes, binades=2), 1e-7) for seed in range(10)]
    results = worlds(2).run(resume, values=values, first=first, second=second, cut=5)
    for uninterrupted, resumed, loaded, exponents in results:
        assert_same_bits(resumed, uninterrupted)
        assert exponents.keys() == loaded.keys()
    assert_same_on_all_ranks([exponents for *_, exponents in results])
