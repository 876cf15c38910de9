"""`Attachment.resynchronize`: a sharded model resumes after a failed step, and no gradient is lost."""

import itertools
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

import gradwire
from gradwire.comm import connections_of
from gradwire.comm.torch_internals import unique_name
from gradwire.exchange import handshake, session
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.sharded import ReduceScatterOptions
from gradwire.sharded.all_reduce import ReplicaAverage
from gradwire.sharded.exchange import ShardedExchange
from gradwire.sharded.reduce_scatter import QuantizedReduceScatter
from tests.support.bits import assert_same_bits
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.sharded import backward, contributions, gradients, norm, sharded, train
from tests.support.training import FailsInBackward, Fault, error_of, message_of, wrapped

FAILS_ON = 1
SHARDS = {"replicate": 1, "hsdp": 2, "fsdp": 4}
START = 2
WITHIN = ReduceScatterOptions(wire="int4", error_dtype=torch.float32, wires={"*.bias": "int4"})


def int4():
    return QuantizationState(wire="int4", start_iter=START, exempt=())


def exact_state():
    """A hook without error memory, which needs none."""
    return QuantizationState(wires={"*": "fp32"}, use_error_feedback=False, start_iter=0)


KINDS = {  # where, and the arguments of attach
    "replicate": ("replicate", lambda: {"state": int4()}),
    "hsdp": ("hsdp", lambda: {"state": int4()}),
    "hsdp-powersgd": ("hsdp", lambda: {"state": PowerSGDState(None, 1, start_powerSGD_iter=START)}),
    "hsdp-both": ("hsdp", lambda: {"state": int4(), "within": WITHIN}),
    "hsdp-within": ("hsdp", lambda: {"within": WITHIN}),
    "hsdp-within-no-errors": ("hsdp", lambda: {"state": exact_state(), "within": WITHIN}),
    "fsdp": ("fsdp", lambda: {"within": WITHIN}),
}


def failing(number, is_done):
    """Let one rank raise in an exchange of the next backward, before all ranks make it or after.

    Exchanges in flight end before, and the other ranks wait for it: a result that only some ranks had received would be
    taken back in part.
    """
    attempt, count = ShardedExchange.attempt, itertools.count()

    def attempt_or_fail(self, group, name, exchange):
        is_last = next(count) == number

        def exchange_or_fail():
            if is_done or not is_last:
                exchange()
            for parameters in list(self._awaited) if is_last else ():
                self._finish(parameters)
            dist.barrier()
            if is_last and dist.get_rank() == FAILS_ON:
                raise Fault("on one rank")
            while is_last:
                for each in self.groups:
                    connections_of(each).check_peers()

        return attempt(self, group, name, exchange_or_fail)

    return mock.patch.object(ShardedExchange, "attempt", attempt_or_fail)


def whole(named):
    return {name: each.full_tensor().double() for name, each in named}


def errors_of(attachment, weight=1.0):
    """All errors of the model, by parameter name. ``weight``: of a replica's mean in the gradient."""
    saved = attachment.state_dict()
    weights = {"errors": weight, "within": 1.0}
    memory = [(weights[entry], whole(saved[entry].items())) for entry in weights if saved.get(entry)]
    return {name: sum(each_weight * each[name] for each_weight, each in memory) for name in memory[0][1]}


def exchanges_of(arguments):
    """Number of exchanges in a backward.

    Three parameter groups, each with the start and the end of an all-reduce, and a reduce-scatter; then one exchange
    per process group at the end of the backward.
    """
    return 6 * ("state" in arguments) + 3 * ("within" in arguments) + 1


@pytest.mark.parametrize(
    ("kind", "reduction"),
    [("hsdp-powersgd", "mean"), *((kind, "sum") for kind in KINDS if kind != "hsdp-powersgd"), ("hsdp-both", "mean")],
)
@on_ranks(4, limit=60)
def test_law1_over_steps_that_fail_at_their_begin_and_at_their_end(kind, reduction):
    """Before the first exchange, a step is lost as a whole. After the last one, all of it is applied later, except for
    parameters without error memory.
    """
    last = exchanges_of(KINDS[kind][1]()) - 1
    at_begin, at_end = fail_and_repeat(kind, reduction, [(0, False), (last, False)])
    assert at_begin == {(0, 0)}
    assert at_end == ({(0, 0), (1, 1)} if "powersgd" in kind else {(1, 1)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4, limit=120)
def test_law1_over_failed_and_repeated_steps(kind):
    """A shard of a replica's gradient in a failed step is either applied later, or lost as a whole."""
    points = itertools.product(range(exchanges_of(KINDS[kind][1]())), (False, True))
    kept = fail_and_repeat(kind, "mean", list(points)[:-1])
    assert kept[0] != {(1, 1)}  # no exchange of the first parameter group in one replica, or between two of its shards
    assert (1, 1) in kept[-1]


@pytest.mark.parametrize(("kind", "reduction"), [("hsdp", "mean"), ("hsdp-both", "mean"), ("hsdp-within", "sum")])
@on_ranks(4, limit=60)
def test_law1_over_steps_that_fail_after_a_micro_batch_without_an_all_reduce(kind, reduction):
    """The error memory of the reduce-scatter takes the sums of the first micro-batch, which FSDP2 forgets."""
    last = exchanges_of(KINDS[kind][1]()) - 1
    at_begin, at_end = fail_and_repeat(kind, reduction, [(0, False), (last, False)], n_micro_batches=2)
    assert at_begin == ({(0, 0, 0)} if kind == "hsdp" else {(1, 0, 0)})
    assert at_end == {(1, 1, 1)}


@on_ranks(4, limit=60)
def test_sums_of_a_micro_batch_that_fails_without_an_all_reduce_are_forgotten():
    """FSDP2 forgets the sums, also in releases whose reset leaves them, or that have none."""
    last = exchanges_of(KINDS["hsdp-within"][1]()) - 1
    with mock.patch.object(FSDPModule, "reset_iter_state", lambda self: None, create=True):
        assert fail_and_repeat("hsdp-within", "mean", [(last, False)], averages=False) == [{(1, 1)}]


def fail_and_repeat(kind, reduction, points, n_micro_batches=1, averages=True):
    """Train with a failed step at each point, an exchange and whether it is done, and check that law 1 holds.

    Only the last of the micro-batches of a failed step fails, and ``averages`` between replicas.

    Returns, for each point, which replicas' shards of the failed step are applied later: (0, 1) is the second's only.
    Sums of an earlier micro-batch come first: (1, 0, 0) are these only.
    """
    place, arguments = KINDS[kind]
    model = sharded(place)
    weight = 1.0
    if reduction == "sum":  # FSDP2 sums, and divides by 4 afterwards
        weight = 4 / SHARDS[place] / 4
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    attachment = gradwire.attach(model, **arguments())
    exact = {name: torch.zeros(each.shape, dtype=torch.float64) for name, each in model.named_parameters()}
    applied = {name: each.clone() for name, each in exact.items()}

    def step(number):
        model.zero_grad()
        error = error_of(backward, model, number)
        assert error is None
        for name, own in contributions(model, number).items():
            exact[name] += own.sum(0)
            applied[name] += dict(model.named_parameters())[name].grad.full_tensor()

    for number in range(START + 1):
        step(number)
    kept = []
    for number, is_done in points:
        model.zero_grad()
        for micro_batch in range(8, 7 + n_micro_batches):
            model.set_requires_all_reduce(False)
            assert error_of(backward, model, micro_batch) is None
            assert all(group.holds_partial_sums() for group in attachment._groups)
        model.set_requires_all_reduce(averages)
        with failing(number, is_done):
            assert "on one rank" in message_of(backward, model, 9)
        assert averages or all(group.holds_partial_sums() for group in attachment._groups)
        model.set_requires_all_reduce(True)
        attachment.resynchronize()
        assert not any(group.holds_partial_sums() for group in attachment._groups)
        step(9)
        own, errors = contributions(model, 9), errors_of(attachment, weight)
        earlier = [contributions(model, micro_batch) for micro_batch in range(8, 7 + n_micro_batches)]
        kept.append(set())
        for name, error in errors.items():
            repeated = error - (exact[name] - applied[name])
            parts = torch.stack([*(each[name].sum(0) for each in earlier), own[name][:2].sum(0), own[name][2:].sum(0)])
            for rows in torch.arange(len(error)).chunk(SHARDS[place]):
                (of,) = (
                    of
                    for of in itertools.product((0, 1), repeat=len(parts))
                    if torch.allclose(repeated[rows], sum(map(torch.mul, of, parts[:, rows])), atol=1e-6, rtol=0)
                )
                exact[name][rows] += sum(map(torch.mul, of, parts[:, rows]))
                kept[-1].add(of)
        if place != "fsdp":
            by_rank = from_all_ranks(gradients(model))
            assert_same_bits(by_rank[0], by_rank[2])
    assert norm(list(errors.values())) > 1e-3
    return kept


@pytest.mark.parametrize("fails", ["all-reduce", "reduce-scatter"])
@on_ranks(4)
def test_steps_and_calls_are_equal_on_all_ranks_after_a_failure_on_half_of_them(fails):
    """Ranks 0 and 2 hold one shard, ranks 0 and 1 are one replica: no process group has ranks of both halves."""
    model = sharded("hsdp")
    attachment = gradwire.attach(model, int4(), within=WITHIN)
    for number in range(START + 1):
        backward(model, number)
    groups = len(attachment._groups)
    # Ranks that fail in the last exchange, after the others have made it.
    owner, name = (ReplicaAverage, "_start") if fails == "all-reduce" else (QuantizedReduceScatter, "_reduce")
    is_late = dist.get_rank() % 2 if fails == "all-reduce" else dist.get_rank() // 2
    native, calls = getattr(owner, name), itertools.count(1)

    def raises_in_the_last(self, *arguments):
        is_last = next(calls) == groups
        if not (is_last and is_late):
            native(self, *arguments)
        if is_last:
            dist.barrier()
            if is_late:
                raise Fault("on one rank")

    def counts():
        return attachment.state.iter, *(each.n_calls for each in attachment._with_errors)

    with mock.patch.object(owner, name, raises_in_the_last):
        assert "on one rank" in message_of(backward, model, 9)
    before = [set(each) for each in zip(*from_all_ranks(counts()), strict=True)]
    assert before[0] == {START + 1, START + 2}
    assert ({START + 1, START + 2} in before[1:]) == (fails == "reduce-scatter")
    attachment.resynchronize()
    assert from_all_ranks(counts()) == [(START + 1, *[START + 2] * groups)] * 4
    assert error_of(backward, model, 9) is None
    assert from_all_ranks(attachment.state.iter) == [START + 2] * 4


@on_ranks(2)
def test_exchange_that_fails_takes_results_in_flight_and_restarts_without_groups():
    group = dist.new_group()
    exchange, taken = ShardedExchange([group], torch.device("cpu"), {"hook": "test"}), []
    exchange.finish_later("parameters", group, "all-reduce", lambda: taken.append("result"))
    exchange.keep_result("parameters", lambda: taken.append("taken back"))
    exchange.begin_average("parameters")
    exchange.leave("expected")
    exchange.leave("again")
    assert taken == ["result"]
    exchange.restart()
    assert taken == ["result", "taken back"]
    assert not exchange.has_averaged("parameters")


@on_ranks(2)
def test_exchange_in_flight_that_fails_is_not_waited_for_again():
    group, calls = dist.new_group(), []
    exchange = ShardedExchange([group], torch.device("cpu"), {"hook": "test"})

    def finish():
        calls.append("finish")
        raise Fault

    exchange.finish_later("parameters", group, "all-reduce", finish)
    exchange.wait()
    assert calls == ["finish"]


@pytest.mark.parametrize("kind", ["replicate", "hsdp-both", "hsdp-within-no-errors", "fsdp"])
@on_ranks(4)
def test_infinite_result_of_a_failed_step_stays_out_of_the_errors(kind):
    place, arguments = KINDS[kind]
    model = sharded(place)
    attachment = gradwire.attach(model, **arguments())
    for number in range(START + 1):
        backward(model, number)
    if dist.get_rank() == 0:
        infinite = model.first.register_forward_hook(lambda module, inputs, output: output * torch.inf)
    with failing(exchanges_of(arguments()) - 1, False):
        assert "on one rank" in message_of(backward, model, 9)
    if dist.get_rank() == 0:
        infinite.remove()
    attachment.resynchronize()
    assert all(each.isfinite().all() for each in errors_of(attachment).values())
    assert error_of(backward, model, 10) is None


@on_ranks(4)
def test_model_offloaded_to_the_cpu_trains_saves_loads_and_resynchronizes():
    def built():
        model = sharded("hsdp", offload_policy=CPUOffloadPolicy(pin_memory=False))
        return model, gradwire.attach(model, int4(), within=WITHIN)

    plain, (model, attachment) = sharded("hsdp"), built()
    gradwire.attach(plain, int4(), within=WITHIN)
    assert_same_bits(train(model), train(plain))
    with failing(0, False):
        assert "on one rank" in message_of(backward, model, 9)
    attachment.resynchronize()
    again, loaded = built()
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(attachment.state_dict())
    assert loaded.state.iter == attachment.state.iter
    torch.testing.assert_close(errors_of(loaded), errors_of(attachment), atol=1e-9, rtol=1e-6)
    assert norm(errors_of(loaded).values()) > 1e-3
    assert error_of(backward, again, 10) is None


@on_ranks(4)
def test_error_of_the_users_on_all_ranks_is_forgotten():
    native, model = sharded("hsdp"), sharded("hsdp")
    attachment = gradwire.attach(model, exact_state(), within=WITHIN)
    handle = model.between.register_forward_hook(lambda module, inputs, output: FailsInBackward.apply(output))
    assert error_of(backward, model, 0)[0] == "Fault"
    handle.remove()
    if hasattr(FSDPModule, "reset_iter_state"):
        attachment.resynchronize()
        total = {}
        for step in range(3):
            for each in (native, model):
                each.zero_grad()
                backward(each, step)
            for name, gradient in gradients(model).items():
                total[name] = total.get(name, 0) + gradients(native)[name] - gradient
        # The layers before the error were reduced in the failed step.
        errors = attachment.state_dict()["within"]
        assert norm([total["first.weight"] - errors["first.weight"].to_local()]) < 1e-6
    else:
        assert "reset_iter_state" in message_of(attachment.resynchronize)


@on_ranks(2)
def test_backward_that_the_user_has_failed_is_no_step_and_one_inside_of_another_begins_none():
    group, taken, callbacks = dist.new_group(), [], []
    exchange = ShardedExchange([group], torch.device("cpu"), {"hook": "test"})
    exchange.step_ends.append(lambda: taken.append("end"))

    def begin(backward):
        with (
            mock.patch.object(gradwire.sharded.exchange, "current_backward", lambda: backward),
            mock.patch.object(gradwire.comm.torch_internals, "queue_callback", callbacks.append),
        ):
            exchange.begin()

    begin(1)
    exchange.keep_result("parameters", lambda: taken.append("taken back"))
    exchange.begin_average("parameters")
    late = partial(exchange.keep_result, "others", lambda: taken.append("late result taken back"))
    exchange.finish_later("others", group, "all-reduce", late)
    begin(2)  # inside of the first one, for which autograd keeps the callback
    assert (len(callbacks), taken) == (1, [])
    callbacks.clear()  # it raises
    begin(3)
    assert (len(callbacks), taken, exchange.n_steps) == (1, ["taken back", "late result taken back"], 0)
    assert not exchange.has_averaged("parameters") and not exchange.is_in_flight("others")


@on_ranks(4)
def test_resynchronize_raises_on_all_ranks_where_a_checkpoint_is_needed():
    model, is_first = sharded("hsdp"), dist.get_rank() == 0
    attachment = gradwire.attach(model, int4())
    backward(model, 0)
    with failing(0, False):
        assert "on one rank" in message_of(backward, model, 1)
    weight = model.first.weight
    if is_first:
        weight.to_local().data.neg_()
    assert "differ among the ranks [0, 2]. Restart" in message_of(attachment.resynchronize)
    if is_first:
        weight.to_local().data.neg_()
    attachment.exchange.n_steps += is_first
    assert "have finished the failed step, others have not. Restart" in message_of(attachment.resynchronize)
    attachment.exchange.n_steps -= is_first
    if is_first:
        handle = weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert "register_post_accumulate_grad_hook" in message_of(attachment.resynchronize)
    if is_first:
        handle.remove()
    with mock.patch.object(session, "collective_counts", lambda group: [int(is_first)]):
        assert "[1] on rank 0" in message_of(attachment.resynchronize)
    attachment.resynchronize()
    assert error_of(backward, model, 1) is None


@on_ranks(4)
def test_missing_collectives_on_one_of_two_groups_of_the_same_ranks_raise_with_its_name():
    model = sharded("fsdp")
    attachment = gradwire.attach(model, within=WITHIN)
    backward(model, 0)
    with failing(0, False):
        assert "on one rank" in message_of(backward, model, 1)
    (shards,) = attachment.exchange.groups
    attachment.exchange.groups.append(dist.new_group())  # as after FSDP2's `set_separate_reduce_scatter_group`
    issued = int(dist.get_rank() == 0)
    with mock.patch.object(session, "collective_counts", lambda group: [issued if group is shards else 0]):
        message = message_of(attachment.resynchronize)
    assert f"the process group {unique_name(shards)}: [1] on rank 0, [0] on rank 1" in message


@pytest.mark.parametrize("kind", ["replicate", "fsdp"])
@on_ranks(4)
def test_checkpoint_loaded_later_on_some_ranks_only_raises_on_all(kind):
    place, arguments = KINDS[kind]
    model = sharded(place)
    attachment = gradwire.attach(model, **arguments())
    backward(model, 0)
    saved = attachment.state_dict()
    if dist.get_rank() == 3:
        attachment.load_state_dict(saved)
    with mock.patch.object(handshake, "AGAIN_TIMEOUT", timedelta(seconds=1)):
        assert "was loaded, or an option was changed, on this rank but not on ranks 0, 1, 2" in message_of(
            backward, model, 1
        )


@on_ranks(2)
def test_attachment_of_a_ddp_saves_and_loads_the_state_of_its_hook():
    ddp, state = wrapped(), QuantizationState(wire="int4", start_iter=0)
    attachment = gradwire.attach(ddp, state)
    ddp(*ddp.module.batch(torch.Generator().manual_seed(dist.get_rank()))).backward()
    saved = attachment.state_dict()
    assert_same_bits(saved["errors"], state.state_dict()["errors"])
    assert any(error.any() for error in saved["errors"].values())
    attachment.load_state_dict(saved)
    assert "call its own resynchronize()" in message_of(attachment.resynchronize)


def test_wait_after_an_error_ends_with_exchanges_in_flight():
    """Ctrl-C while this rank leaves keeps the other exchanges in flight."""
    exchange = ShardedExchange([], torch.device("cpu"), {})
    exchange._error = RuntimeError("an earlier exchange")
    exchange._awaited = {each: (None, "all-reduce", lambda: None) for each in "ab"}
    exchange.wait()
    assert exchange._awaited == {}
