"""Laws over random sequences of events: what happens between two steps has the effect that it should have.

- Steps that are recorded and replayed, as on a GPU, have the results of steps that run in full.
- Both DDPs have the same results.
- Laws 1, 2 and 5, and exact means, hold on either DDP, with errors and `resynchronize` on gradwire's.

Results are gradients, memory, step counts, checkpoints, metrics, warnings and errors. `make random` draws sequences
from a new seed, which it prints, for as long as you like.
"""

import os
import secrets
import time
from dataclasses import replace
from functools import partial
from math import isclose

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from gradwire.testing._cases import Parameter
from tests.support.bits import differences
from tests.support.harness import INTERPRETER, World
from tests.support.ranks import from_all_ranks
from tests.support.sequence_events import EVENTS
from tests.support.sequence_training import Training
from tests.support.sequences import DDPS, HOOKS, LAWS, REPLAYS, Event, Sequence
from tests.support.training import SMALL, SMALLEST, error_of

LIMIT = 180  # seconds for a sequence
# Without the phase that explains a failure: it takes hundreds of runs.
PROPERTY = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=set(settings.default.phases) & {Phase.generate, Phase.shrink},
)
AT_ONCE = 9  # sequences of a seed: the tenth and later ones would be similar to earlier ones


# --- on the ranks


def findings(sequence):
    """What is wrong, in words, and the number of replayed buckets."""
    if sequence.mode == LAWS:
        training = Training(sequence, sequence.wrapper).run()
        first, *others = from_all_ranks(training.shared)
        return [*training.problems, *(line for other in others for line in differences(other, first, "law 2: "))], 0
    if sequence.mode == REPLAYS:
        expected, found = (Training(sequence, sequence.wrapper, warm_up=steps).run() for steps in (10**9, 1))
    else:
        expected, found = (Training(sequence, wrapper).run() for wrapper in ("pytorch", "gradwire"))
    problems = [*expected.problems, *found.problems, *differences(found.outcome, expected.outcome)]
    for step in expected.metrics.keys() | found.metrics.keys():
        problems += apart(step, found.metrics, expected.metrics, sequence.mode)
    return problems, sum(found.replays)


def apart(step, found, expected, mode):
    """The metrics of a step that differ. On the two DDPs, norms are summed in other orders."""
    found, expected = found.get(step, {}), expected.get(step, {})
    tolerance = {"rel_tol": 1e-4, "abs_tol": 1e-6} if mode == DDPS else {"rel_tol": 0}
    return [
        f"metrics of step {step}: {name} is {found.get(name)}, not {expected.get(name)}"
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not same(found[name], expected[name], tolerance)
    ]


def same(number, other, tolerance):
    return str(number) == str(other) or isclose(float(number), float(other), **tolerance)


# --- sequences

SHAPES = [(12, 8), (5,), (6, 10), (), (0, 3), (7,), (16, 16), (3, 4, 5), (4, 3, 2, 2), (33, 9), (1, 1), (130,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64]
BUCKET_CAPS_MB = [1.0, SMALL, SMALLEST]
DDP_OPTIONS = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    {"check_every": 2},
]
QUICK_SHAPES = [(8, 6), (5,), (), (0, 3), (6, 4), (2, 3, 2, 2)]  # for the interpreter


@st.composite
def parameters(draw, is_quick):
    """Two to four parameters, or two to three, most of them of one dtype. The first is a matrix."""
    usual = draw(st.sampled_from([torch.float32] * 3 + DTYPES))
    dtypes = st.sampled_from([usual] * 4 + DTYPES)
    layouts = st.sampled_from(["contiguous", "contiguous", "transposed", "strided"])
    matrices = [(12, 8)] if is_quick else [(12, 8), (16, 16), (33, 9)]
    first = st.builds(Parameter, st.sampled_from(matrices), st.just(usual), layouts)
    other = st.builds(Parameter, st.sampled_from(QUICK_SHAPES if is_quick else SHAPES), dtypes, layouts)
    return (draw(first), *draw(st.lists(other, min_size=1, max_size=2 if is_quick else 3)))


@st.composite
def sequences(draw, mode, kinds, is_quick=False):
    """Sequences of a mode, with hooks of these kinds."""
    kind = draw(st.sampled_from(kinds))
    values = HOOKS[kind].values
    chosen = draw(st.sets(st.sampled_from(sorted(values)), max_size=2)) if values else ()
    drawn = draw(parameters(is_quick))
    sequence = Sequence(
        mode,
        kind,
        options={name: draw(st.sampled_from(values[name])) for name in sorted(chosen)},
        wrapper=None if mode == DDPS else draw(st.sampled_from(["gradwire", "gradwire", "pytorch"])),
        ddp={
            **draw(st.sampled_from(DDP_OPTIONS)),
            "gradient_as_bucket_view": draw(st.booleans()),
            "bucket_cap_mb": draw(st.sampled_from(BUCKET_CAPS_MB)),
        },
        parameters=drawn,
        tied=tuple(sorted(draw(st.sets(st.integers(0, len(drawn) - 1), max_size=1)))),
    )
    sequence = sensible(sequence)
    names = sorted(name for name, each in EVENTS.items() if each.fits(sequence))
    events = st.sampled_from(["plain"] * (len(names) // 4) + names).flatmap(
        lambda name: EVENTS[name].values(sequence).map(partial(Event, name))
    )
    return replace(sequence, events=tuple(draw(st.lists(events, min_size=3, max_size=7 if is_quick else 10))))


def sensible(sequence):
    """The sequence without what its mode cannot compare. Rejects options that exclude each other."""
    make, ddp, parameters = sequence.hook.make, dict(sequence.ddp), sequence.parameters
    assume(make is None or error_of(make, None, **sequence.options) is None)
    if not sequence.is_ours:
        ddp.pop("check_every", None)
        parameters = tuple(replace(each, dtype=each.dtype.to_real()) for each in parameters)
        if len({each.dtype for each in parameters}) > 1:
            ddp.pop("static_graph", None)  # the first step of several dtypes is counted twice
    if sequence.mode == DDPS and sequence.hook.state_type is not None:
        ddp.pop("skip_all_reduce_unused_params", None)  # PyTorch's DDP may end a step late
    return replace(sequence, ddp=ddp, parameters=parameters)


# --- tests


def check(worlds, mode, kinds, number, first, *, sizes=(2, 3), is_quick=False):
    """Check random sequences of the seed ``first``; returns the number of replayed buckets."""
    n_replays = 0

    @seed(first)
    @settings(PROPERTY, max_examples=number)
    @given(sequence=sequences(mode, kinds, is_quick), size=st.sampled_from(sizes))
    def check_sequences(sequence, size):
        nonlocal n_replays
        problems, replays = zip(*worlds(size).run(findings, limit=LIMIT, sequence=sequence), strict=True)
        n_replays += replays[0]
        assert not any(problems), "\n".join(sorted({line for each in problems for line in each}))

    check_sequences()
    return n_replays


@pytest.fixture(scope="module")
def interpreted_worlds(tmp_path_factory):
    opened = [World(size, tmp_path_factory.mktemp(f"interpreted_world_of_{size}"), INTERPRETER) for size in (2, 3)]
    yield lambda size: opened[size - 2]
    for world in opened:
        world.close()


# The code path of the other kinds is that of one of these.
@pytest.mark.parametrize("kind", ["none", "fp16", "two_hooks", "perchannel", "quantization", "powersgd"])
def test_replayed_steps_have_the_results_of_full_steps(interpreted_worlds, kind):
    assert check(interpreted_worlds, REPLAYS, (kind,), 3, kind, sizes=(2,), is_quick=True) > 0


@pytest.mark.parametrize("kind", HOOKS)
def test_law4_both_ddps_have_the_same_results(worlds, kind):
    check(worlds, DDPS, (kind,), 2, kind)


@pytest.mark.parametrize("kind", HOOKS)
def test_laws_hold(worlds, kind):
    check(worlds, LAWS, (kind,), 2, kind)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", [REPLAYS, DDPS, LAWS])
def test_sequences_of_a_new_seed(mode, worlds, interpreted_worlds):
    """``GRADWIRE_SEED`` repeats a run. ``GRADWIRE_MINUTES`` is the time for each mode, by default two."""
    number = int(os.environ.get("GRADWIRE_SEED", secrets.randbits(32)))
    until = time.monotonic() + 60 * float(os.environ.get("GRADWIRE_MINUTES", "2"))
    while time.monotonic() < until:
        print(f"GRADWIRE_SEED={number}, {mode}", flush=True)
        of_mode = interpreted_worlds if mode == REPLAYS else worlds
        check(of_mode, mode, tuple(HOOKS), AT_ONCE, number)
        number += 1
