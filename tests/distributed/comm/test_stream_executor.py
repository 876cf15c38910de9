"""`StreamExecutor`: the order of kernels and collectives on its two streams, with operators of PyTorch as kernels."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from gradwire.comm import Task
from gradwire.comm.plan import Plan
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.compress import (
    BucketScale,
    DelayedScaling,
    LowRankBucket,
    LowRankPolicy,
    Quantization,
    QuantizedBucket,
    Step,
    WirePolicy,
    alternating_all_reduce,
    cast_all_reduce,
    powersgd_all_reduce,
    quantized_all_reduce,
    scaled_cast_all_reduce,
)
from gradwire.reducer.reducer import Backward
from tests.support.happens_before import RACE, CheckedTransport, checking

CPU = torch.device("cpu")
N_BUCKETS, STEPS = 3, 3


def make_gradients():
    return [torch.empty(48, 32), torch.empty(32)]


class Cast:
    def __init__(self, _):
        pass

    def __call__(self, tensors, iteration, is_last, transport, workspace):
        return cast_all_reduce(Step.of(None, tensors, tensors, 0, transport, workspace), torch.bfloat16)


class ScaledCast:
    counters = None

    def __init__(self, _):
        self.scale = BucketScale(torch.zeros(2, dtype=torch.int32))
        ScaledCast.counters = torch.zeros(4, dtype=torch.int64)

    def __call__(self, tensors, iteration, is_last, transport, workspace):
        step = Step.of(None, tensors, tensors, 0, transport, workspace)
        return scaled_cast_all_reduce(step, DelayedScaling(), self.scale, self.counters, is_last)


class PowerSGD:
    algorithm, options = staticmethod(powersgd_all_reduce), {}

    def __init__(self, _):
        layouts = [torch.zeros_like(each) for each in make_gradients()]
        self.bucket = LowRankBucket(layouts, LowRankPolicy(rank=2).matrix_shapes(layouts), **self.options)

    def __call__(self, tensors, iteration, is_last, transport, workspace):
        return self.algorithm(Step.of(self.bucket, tensors, tensors, iteration, transport, workspace))


class Alternating(PowerSGD):
    algorithm, options = staticmethod(alternating_all_reduce), {"alternating": True}


class Quantized:
    def __init__(self, transport):
        layouts = [torch.zeros_like(each) for each in make_gradients()]
        formats = WirePolicy(wire="int4").wire_formats(layouts)
        self.bucket = QuantizedBucket(layouts, formats, transport, Quantization())

    def __call__(self, tensors, iteration, is_last, transport, workspace):
        return quantized_all_reduce(Step.of(self.bucket, tensors, tensors, iteration, transport, workspace))


ALGORITHMS = {each.__name__: each for each in (Cast, ScaledCast, PowerSGD, Alternating, Quantized)}


def train(algorithm):
    """Steps of a few buckets: the main stream writes gradients, the executor averages them, the main stream reads."""
    transport = CheckedTransport()
    executor = StreamExecutor(transport, CPU)
    hooks = [ALGORITHMS[algorithm](transport) for _ in range(N_BUCKETS)]
    for iteration in range(STEPS):
        futures, buckets = [], []
        for k, hook in enumerate(hooks):
            tensors, is_last = [each.normal_() for each in make_gradients()], k == N_BUCKETS - 1
            buckets.append(tensors)

            async def task(workspace, hook=hook, tensors=tensors, is_last=is_last, iteration=iteration):
                await hook(tensors, iteration, is_last, transport, workspace)
                return tensors

            futures.append(executor.submit(Task(task)))
        for future, tensors in zip(futures, buckets, strict=True):
            assert future.wait() is tensors
            for tensor in tensors:  # as the optimizer does
                tensor.add_(1)
    return executor


EDGES = {("main", "kernels"), ("kernels", "collectives"), ("collectives", "kernels"), ("kernels", "main")}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_streams_wait_for_all_that_they_use_and_for_nothing_else(algorithm):
    with checking() as checker:
        executor = train(algorithm)
    assert not checker.findings
    assert checker.edges == EDGES
    assert len(executor.transport.issued) >= N_BUCKETS * STEPS
    assert executor._kernels.priority == executor._collectives.priority == -1


def test_waiting_for_a_task_without_a_result_orders_what_it_wrote():
    with checking() as checker:
        executor, tensor = StreamExecutor(CheckedTransport(), CPU), torch.ones(8)

        async def task():
            tensor.add_(1)
            await executor.transport.all_reduce(tensor)
            tensor.add_(1)

        executor.submit(Task(lambda _: task())).wait()
        tensor.mul_(2)
    assert not checker.findings
    assert tensor.tolist() == [6.0] * 8


def failed_step(executor):
    """The futures of a step that fails after its first bucket."""

    async def task():
        return torch.ones(8)

    return SimpleNamespace(futures=[executor.submit(Task(lambda _: task())), None])


def test_results_of_a_failed_step_are_waited_for_before_they_return_to_the_error_memory():
    with checking() as checker:
        step = failed_step(StreamExecutor(CheckedTransport(), CPU))
        result, nothing = Backward.take_values(step, is_needed=True)
        result.add_(1)  # on the main stream
    assert not checker.findings
    assert nothing is None


def test_results_of_a_failed_step_that_nobody_needs_are_not_waited_for():
    """A peer may have left before their collectives: the caller's stream would wait for the timeout."""
    with checking() as checker:
        step = failed_step(StreamExecutor(CheckedTransport(), CPU))
        assert Backward.take_values(step, is_needed=False) == [None, None]
    assert ("kernels", "main") not in checker.edges
    assert step.futures == []


def test_result_of_a_wrapper_is_waited_for_after_a_failed_step():
    """It is written on a stream of PyTorch's, for which nothing keeps the gradients."""
    with checking() as checker:
        written = torch.zeros(8)
        step = failed_step(StreamExecutor(CheckedTransport(), CPU))
        step.futures[0] = step.futures[0].then(lambda future: written.add_(1))
        Backward.take_values(step, is_needed=False)
        written.add_(1)
    assert not checker.findings
    assert ("pool", "main") in checker.edges


# --- replays


class Recording:
    """Notes launches: calls that run in the stream of the kernels, wherever they are called."""

    current = None

    def __init__(self, _):
        self.calls, self.kept, self.operator = [], [], None

    def __enter__(self):
        Recording.current = self
        return self

    def __exit__(self, *_):
        Recording.current = None


def launch(checker, executor, work):
    """Run work on the device, as a kernel."""

    def call():
        with checker.on(executor._kernels):
            work()

    call()
    if Recording.current is not None:
        Recording.current.calls.append(call)


def replay_steps(checker, missing=None, fails_at=None, takes_future=False):
    """A recorded step of three tasks of two collectives, and two replayed ones without the edges ``missing``.

    Returns the executor, and the outcomes of the tasks of the last step: their result, or the text of the error.
    """
    executor = StreamExecutor(CheckedTransport(), CPU)
    plans, calls, run = [], [], executor.transport.run
    buffers, gradients = [torch.ones(8) for _ in range(2)], [torch.ones(8) for _ in range(N_BUCKETS)]
    checker.leaves_out = lambda event, stream: len(plans) == N_BUCKETS and (event.stream.name, stream.name) == missing

    def failing(collective):
        calls.append(collective)
        if len(calls) - 1 == fails_at:
            raise ValueError("expected")
        run(collective)

    async def task(_, buffer, gradient):
        for _ in range(2):
            launch(checker, executor, lambda: buffer.copy_(gradient))
            await executor.transport.all_reduce(buffer)
        launch(checker, executor, lambda: gradient.copy_(buffer))
        return gradient

    with mock.patch.object(executor.transport, "run", failing):
        for step in range(3):
            if step == 1:
                checker.edges.clear()
            flights = []
            for k, gradient in enumerate(gradients):
                gradient.mul_(2)  # the backward, in the main stream
                if step == 0:
                    plan = Plan(Recording, executor.workspace_index, [gradient], lambda: None)
                    begin = partial(task, buffer=buffers[executor.workspace_index], gradient=gradient)
                    flights.append(executor.submit(Task(begin), plan))
                    plans.append(plan)
                else:
                    flights.append(executor.replay(plans[k], gradient, lambda: None, takes_future))
            executor.finish()
            outcomes = []
            for flight in flights:
                try:
                    outcomes.append(flight.wait())
                except ValueError as error:
                    outcomes.append(str(error))
            for gradient in gradients if not executor.has_failed else []:
                gradient.add_(1)  # the optimizer
    assert all(plan.is_complete for plan in plans)
    return executor, [next((k for k, g in enumerate(gradients) if g is each), each) for each in outcomes]


@pytest.mark.parametrize("takes_future", [False, True])
def test_replays_join_the_streams_as_other_steps_do(takes_future):
    with checking() as checker:
        _, outcomes = replay_steps(checker, takes_future=takes_future)
    assert not checker.findings
    assert checker.edges == EDGES
    assert outcomes == [0, 1, 2]


@pytest.mark.parametrize("takes_future", [False, True])
@pytest.mark.parametrize("edge", sorted(EDGES))
def test_replay_without_an_edge_is_a_race(edge, takes_future):
    with checking() as checker:
        replay_steps(checker, missing=edge, takes_future=takes_future)
    assert checker.kinds == {RACE}


@pytest.mark.parametrize(("fails_at", "outcomes"), [(12, ["expected"] * 3), (15, [0, "expected", "expected"])])
def test_failed_collective_of_a_replay_fails_the_tasks_in_flight(fails_at, outcomes):
    """Of the collectives C1, C2, C1', C3, C2', C3' of the last step, the first or the fourth fails."""
    with checking() as checker:
        executor, seen = replay_steps(checker, fails_at=fails_at)
    assert seen == outcomes
    assert executor.has_failed
    assert len(executor.transport.issued) == fails_at, "none after the failure"


def test_full_task_after_a_replayed_one_leaves_the_callers_stream_current():
    with checking() as checker:
        executor, tensor = StreamExecutor(CheckedTransport(), CPU), torch.ones(8)

        async def task(_):
            await executor.transport.all_reduce(tensor)

        plan = Plan(Recording, executor.workspace_index, [], lambda: None)
        executor.submit(Task(task), plan)
        executor.finish()
        executor.replay(plan, tensor, lambda: None)
        executor.submit(Task(task))
        assert checker.current is checker.main


def noted(executor, events, name, fails_at=None):
    """A task of two collectives that notes what it does."""

    async def task(workspace):
        buffer = workspace.wire(8, torch.float32).zero_()
        for part in range(3):
            if part == fails_at:
                raise ValueError("expected")
            buffer.add_(1)
            events.append((name, part, workspace))
            if part < 2:
                await executor.transport.all_reduce(buffer)
        return name

    return task


def test_first_collective_precedes_later_ones_of_the_previous_task():
    events = []
    with checking():
        executor = StreamExecutor(CheckedTransport(), CPU)
        for _ in range(2):
            futures = [executor.submit(Task(noted(executor, events, k))) for k in (1, 2, 3)]
            assert [future.wait() for future in futures] == [1, 2, 3]
    # A1, A2, B1, D1, A3, B2, D2, B3, D3: a collective follows each A and B.
    parts = [(1, 0), (2, 0), (1, 1), (1, 2), (3, 0), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert [event[:2] for event in events] == parts * 2
    used = [workspace for _, part, workspace in events if part == 0]
    assert used == [executor.workspaces[k] for k in (0, 1, 0)] * 2, "the same ones in every step"


def test_kernels_do_not_wait_for_a_collective_of_the_next_task():
    known = []
    with checking() as checker:
        executor = StreamExecutor(CheckedTransport(), CPU)
        transport = executor.transport

        async def task(workspace):
            buffer = workspace.wire(8, torch.float32).zero_()
            await transport.all_reduce(buffer)
            known.append(checker.current.clock[executor._collectives])
            await transport.all_reduce(buffer)

        for _ in range(3):
            executor.submit(Task(task))
        executor.finish()
    # Of the collectives C1, C2, C1', C3, C2', C3': B1 comes after the first, B2 after D1 and thus the third, B3
    # after D2 and the fifth.
    assert known == [1, 3, 5]


def test_future_of_an_earlier_task_completes_when_awaited():
    events = []
    with checking():
        executor = StreamExecutor(CheckedTransport(), CPU)
        assert executor.submit(Task(noted(executor, events, 1))).wait() == 1
        first = executor.submit(Task(noted(executor, events, 2)))
        seen = []
        first.add_done_callback(lambda future: seen.append(future.value()))
        assert seen == []
        assert first.done()
        assert seen == [2]
        assert executor.submit(Task(noted(executor, events, 3))).value() == 3


def test_last_future_of_a_backward_completes_without_being_awaited():
    """As C++ does: it calls no methods of Python's futures."""
    events, futures = [], []
    with checking():
        executor = StreamExecutor(CheckedTransport(), CPU)
        x = torch.ones(3, requires_grad=True)
        y, z = 2 * x, 3 * x
        for k, each in enumerate((y, z)):
            each.register_hook(lambda _, k=k: futures.append(executor.submit(Task(noted(executor, events, k)))))
        for _ in range(2):
            (y.sum() + z.sum()).backward(retain_graph=True)
            assert [torch._C.Future.done(future) for future in futures] == [True] * len(futures)
    assert len(futures) == 4


@pytest.mark.parametrize("part", [0, 1, 2])
def test_failed_task_ends_all_collectives_and_fails_the_tasks_in_flight(part):
    events = []
    with checking():
        executor = StreamExecutor(CheckedTransport(), CPU)
        first = executor.submit(Task(noted(executor, events, 1)))
        second = executor.submit(Task(noted(executor, events, 2, fails_at=part)))
        third = executor.submit(Task(noted(executor, events, 3)))
        fourth = executor.submit(Task(noted(executor, events, 4)))
        outcomes = []
        for future in (first, second, third, fourth):
            try:
                outcomes.append(future.wait())
            except ValueError as error:
                outcomes.append(str(error))
        # The first is past its second collective unless the second fails at once.
        assert outcomes == ["expected" if part == 0 else 1, *["expected"] * 3]
        assert executor.has_failed
        begun = [name for name, number, _ in events if number == 0]
        assert begun == ([1] if part == 0 else [1, 2, 3])
