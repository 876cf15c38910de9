"""Training on the double of a GPU, as scenarios of the happens-before checker (`happens_before`).

`run` calls them on a rank. Nothing may be found in them.
"""

import gc
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard

import gradwire
from gradwire import collectives
from gradwire.bench.host_double import DEVICE
from gradwire.comm.torch_internals import queue_callback
from gradwire.exchange import plans
from gradwire.hooks import default_hooks, powerSGD_hook, quantization_hooks
from gradwire.reducer.unused_parameters import UsedParameters
from gradwire.sharded import reduce_scatter as reduce_scatter_of_shards
from tests.support import happens_before, training
from tests.support.happens_before import Stream
from tests.support.training import WRAPPERS, Fault, Scaler, register
from tests.support.zoo import Probe

MATRIX, VECTOR = (20, 20), (200,)
N_BUCKETS = 3
MODEL = [MATRIX, VECTOR, VECTOR] * N_BUCKETS
VECTORS = {"shapes": [VECTOR] * N_BUCKETS, "buckets": N_BUCKETS}  # each alone in its bucket
WARM_UP_STEPS = 1  # before a step is recorded
STEPS, LATER = 8, 6  # so many that the last are replays, at first and later


def _quantized(wire, **options):
    return lambda group: (
        quantization_hooks.QuantizationState(group, wire, start_iter=2, **options),
        quantization_hooks.quantization_hook,
    )


def _powersgd(hook=powerSGD_hook.powerSGD_hook, **options):
    return lambda group: (powerSGD_hook.PowerSGDState(group, 4, 2, 1, **options), hook)


def _fp16_of(make, hook):
    return lambda group: (make(group)[0], default_hooks.fp16_compress_wrapper(hook))


# One of each kind, and options that change launches, collectives or memory. Each makes (state, hook) anew.
_KINDS = (
    "allreduce",
    "fp16",
    "bf16_in_fp32",
    "fp16_of_allreduce",
    "fp16_of_pytorch",
    "scaled_fp16",
    "int4_on_nodes",
    "topk",
)
HOOKS = {
    "none": None,
    **{name: training.HOOKS[name] for name in _KINDS},
    **{wire: _quantized(wire) for wire in ("int8", "int4", "sign")},
    "int4_with_bf16_errors": _quantized("int4", error_dtype=torch.bfloat16),
    "powersgd": _powersgd(),
    "powersgd_int8": _powersgd(factor_wire="int8"),
    "powersgd_alternating": _powersgd(alternating=True),
    "powersgd_cold": _powersgd(warm_start=False),
    "powersgd_batched": _powersgd(powerSGD_hook.batched_powerSGD_hook),
    "fp16_of_int4": _fp16_of(_quantized("int4"), quantization_hooks.quantization_hook),
    "fp16_of_powersgd": _fp16_of(_powersgd(), powerSGD_hook.powerSGD_hook),
}
DDPS = {
    "gradwire": {},
    "gradwire, views": {"gradient_as_bucket_view": True},
    "pytorch": {"wrapper": "pytorch"},
    "pytorch, views": {"wrapper": "pytorch", "gradient_as_bucket_view": True},
}


PAIRS = [(hook, ddp) for hook in HOOKS for ddp in DDPS if not (hook == "none" and "pytorch" in ddp)]  # of gradwire's


def _awaited_by_pytorch(hook):
    """A hook whose futures the stream of the backward awaits at its end, as PyTorch's C++ does."""

    def awaited(state, bucket):
        future = hook(state, bucket)
        queue_callback(lambda: future.event is not None and Stream.checker.current.wait_event(future.event))
        return future

    return awaited


class Training:
    """A model of matrices and vectors in a DDP.

    Args:
        hook: a name of `HOOKS`.
        buckets: number of buckets.
        options: those of the DDP.
    """

    def __init__(
        self, hook, wrapper="gradwire", *, group=None, shapes=MODEL, buckets=N_BUCKETS, set_to_none=True, **options
    ):
        self.group = group or dist.new_group(backend=happens_before.BACKEND)
        self.module, self.wrapper, self.set_to_none = Probe(*shapes), wrapper, set_to_none
        self.parameters = list(self.module.parameters())
        self.inputs = [torch.ones(shape) for shape in shapes]
        cap = sum(each.nbytes for each in self.parameters) / buckets / 2**20
        self._options = {"process_group": self.group, "bucket_cap_mb": cap, **options}
        self.registration = None if HOOKS[hook] is None else HOOKS[hook](self.group)
        self.wrap()

    @property
    def state(self):
        return self.registration[0]

    def wrap(self):
        """Wrap the model, also anew."""
        self.ddp = WRAPPERS[self.wrapper](self.module, **self._options)
        if self.registration is not None:
            self.register(*self.registration)

    def register(self, state, hook):
        register(self.ddp, (state, _awaited_by_pytorch(hook) if self.wrapper == "pytorch" else hook))

    def clear(self):
        self.ddp.zero_grad(set_to_none=self.set_to_none)

    def backward(self):
        self.ddp(*self.inputs).backward()

    @torch.no_grad()
    def optimize(self):
        for each in self.parameters:
            if each.grad is not None:
                each.sub_(each.grad, alpha=0.1)

    def step(self):
        self.clear()
        self.backward()
        self.optimize()

    def steps(self, n):
        for _ in range(n):
            self.step()


# --- steps of a DDP


def plain(hook, **options):
    Training(hook, **options).steps(STEPS)


def accumulation(hook, **options):
    trained = Training(hook, **options)
    for _ in range(STEPS):
        trained.clear()
        with trained.ddp.no_sync():
            trained.backward()
        trained.backward()
        trained.optimize()


def two_backwards(hook):
    trained = Training(hook)
    trained.steps(STEPS)
    for _ in range(LATER):
        trained.clear()
        for loss in [trained.ddp(*trained.inputs) for _ in range(2)]:
            loss.backward()
        trained.optimize()


def unused_parameters(hook):
    trained = Training(hook, find_unused_parameters=True)
    for step in range(STEPS):
        trained.inputs[0] = None if step % 3 == 2 else torch.ones(MATRIX)
        trained.step()


def _fails(*_):
    raise Fault("expected")  # not in a mock, which would keep its traceback and so the tensors in it


def joined_rank(hook, fails_at=None, fails_after_launches=False):
    """Steps of a rank without inputs, which sends zeros.

    Collective ``fails_at`` of one raises, whose error holds the zeros until all ranks begin again; or with
    ``fails_after_launches``, the comparison of unused parameters, which holds nothing.
    """
    trained = Training(hook, find_unused_parameters=fails_after_launches)
    trained.steps(STEPS)
    for _ in range(2):
        trained.ddp.reducer.reduce_zeros()
    if fails_at is not None:
        Stream.checker.fails_at = fails_at
        with suppress(Fault):
            trained.ddp.reducer.reduce_zeros()
        recover(trained)
    if fails_after_launches:
        with suppress(Fault), mock.patch.object(UsedParameters, "exchange_none", _fails):
            trained.ddp.reducer.reduce_zeros()
        recover(trained)
    trained.steps(LATER)


def buffers(hook):
    trained = Training(hook)
    trained.module.register_buffer("count", torch.zeros(4))
    trained.wrap()
    for _ in range(STEPS):
        trained.module.count.add_(1)
        trained.step()


def two_models(hook):
    group = dist.new_group(backend=happens_before.BACKEND)
    both = [Training(hook, group=group), Training(hook, group=group, shapes=MODEL[:6], buckets=2)]
    for _ in range(STEPS):
        for each in both:
            each.step()
    for _ in range(LATER):  # in one backward
        for each in both:
            each.clear()
        sum(each.ddp(*each.inputs) for each in both).backward()
        for each in both:
            each.optimize()


def users_streams(hook, n_streams):
    """Steps on streams of the user's, in turn."""
    trained, streams = Training(hook), [Stream(name="a user's") for _ in range(n_streams)]
    for step in range(STEPS):
        stream, current = streams[step % n_streams], torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            trained.step()
        current.wait_stream(stream)


def graph(hook):
    """A captured backward, replayed with other inputs."""
    stream = Stream(name="capture")
    with torch.cuda.stream(stream):
        trained = Training(hook)
        trained.steps(STEPS)
    trained.clear()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        trained.backward()
    for _ in range(LATER):
        for each in trained.inputs:
            each.mul_(2)
        captured.replay()
        trained.optimize()
    torch.cuda.synchronize()


# --- what happens between two steps


def between(hook, act, **options):
    """``act`` is called twice, before steps that would be replays."""
    trained = Training(hook, **options)
    for step in range(STEPS + LATER):
        if step in (STEPS - 1, STEPS + LATER - 4):
            act(trained)
        trained.step()


def drop_memory(trained):
    trained.state.memory.drop_buckets()


def save_and_load(trained):
    trained.state.load_state_dict(trained.state.state_dict())


def save(trained):
    trained.state.prepare_checkpoint()
    trained.state.state_dict()


def assign_option(trained):
    options = trained.state.options
    name = next(name for name in ("margin", "seed", "random_seed") if hasattr(options, name))
    trained.state.options = replace(options, **{name: getattr(options, name) + 1})


def follow_scaler(trained):
    trained.state.follow_scaler(trained.state.memory.scaler or Scaler(4.0))
    trained.state.memory.scaler.scale /= 2


def observe(trained):
    if trained.state.telemetry is None:
        trained.state.observe(every=2, exact_every=3)
    else:
        trained.state.metrics()
        trained.state.stop_observing()


def later_hook(hook):
    trained = Training("none")
    trained.steps(STEPS)
    trained.register(*HOOKS[hook](trained.group))
    trained.steps(STEPS)


# --- errors that training survives


def recover(trained):
    """What a loop does after an error: it frees the gradients, and begins again."""
    trained.clear()
    torch.ones(MATRIX)  # such as the next batch, which may get their memory
    trained.ddp.resynchronize()


def wrap_again(trained):
    trained.clear()
    trained.wrap()
    torch.ones(MATRIX)


def error_in_backward(hook, at, recover=recover, **options):
    """The user's hook of the gradient of parameter ``at`` raises: with 4, one bucket is in flight; with 1, two are."""
    trained, raises = Training(hook, **options), []

    def user_hook(gradient):
        if raises:
            raise Fault("in a backward")

    trained.parameters[at].register_hook(user_hook)
    trained.steps(STEPS)
    dist.barrier()
    raises.append(True)
    with suppress(Fault):
        trained.step()
    raises.clear()
    recover(trained)
    trained.steps(LATER)


def error_in_collective(hook, at, recover=recover, **options):
    """Collective ``at`` of a step raises."""
    trained = Training(hook, **options)
    trained.steps(STEPS)
    trained.clear()
    dist.barrier()
    Stream.checker.fails_at = at
    with suppress(Fault):
        trained.backward()
    assert Stream.checker.fails_at is None
    recover(trained)
    trained.steps(LATER)


# --- collectives without a DDP


def _tensors(*shapes):
    return [torch.ones(shape) for shape in shapes]


def calls(call, *arguments, with_memory=False):
    """Calls of a collective, each on new tensors; in the last but `LATER`, a collective raises."""
    group = dist.new_group(backend=happens_before.BACKEND)
    memory = collectives.Memory() if with_memory else None
    for step in range(STEPS + LATER):
        if step == STEPS:
            Stream.checker.fails_at = 0
            with suppress(Fault):
                call(group, memory, *arguments)
            assert Stream.checker.fails_at is None
            torch.ones(MATRIX)
            collectives.resynchronize(group, *([memory] if with_memory else []))
        call(group, memory, *arguments)


def _entry(memory, *names):
    return memory and memory[names[0] if len(names) == 1 else names]


def all_reduce(group, memory, wire):
    (tensor,) = _tensors(MATRIX)
    collectives.all_reduce(tensor, group=group, wire=wire, memory=_entry(memory, "a"))
    tensor.add_(1)


def several_in_flight(group, memory, op):
    tensors = _tensors(MATRIX, (30, 30), VECTOR, MATRIX)
    works = [collectives.all_reduce(each, op, group, True, wire="int8") for each in tensors]
    for work in works:
        work.wait()
    for tensor in tensors:
        tensor.add_(1)


def tensors_dropped_in_flight(group, memory, op):
    works = [collectives.all_reduce(each, op, group, True, wire="int8") for each in _tensors(MATRIX, VECTOR)]
    for work in works:
        work.wait()


def handles_dropped(group, memory, op):
    for tensor in _tensors(MATRIX, VECTOR):
        collectives.all_reduce(tensor, op, group, True, wire="int8")


def coalesced(group, memory):
    tensors, entry = _tensors(MATRIX, (7,), (20, 3)), _entry(memory, "a", "b", "c")
    collectives.all_reduce_coalesced(tensors, group=group, async_op=True, wire="int4", memory=entry).wait()
    for tensor in tensors:
        tensor.add_(1)


def reduce_scatter(group, memory, is_source_dropped):
    source, output, entry = torch.ones(640), torch.empty(640 // group.size()), _entry(memory, "a")
    work = collectives.reduce_scatter_tensor(output, source, group=group, async_op=True, wire="int8", memory=entry)
    if is_source_dropped:
        del source
    work.wait()
    output.add_(1)
    if not is_source_dropped:
        source.add_(1)


# --- FSDP2


def sharded(is_replicated, hook=None, fails_at=None, fails_in_wait=False, detaches=False, **options):
    """A model that is sharded or replicated by FSDP2. ``options`` are those of `gradwire.attach`.

    Collective ``fails_at`` of a step raises, whose error holds the gradients until all ranks begin again; or with
    ``fails_in_wait``, a wait for a result, whose error holds nothing. The loop then goes on without compression if it
    ``detaches``.
    """
    group, here = dist.new_group(backend=happens_before.BACKEND), dist.get_rank()
    if is_replicated:
        alone = [dist.new_group([rank], backend=happens_before.BACKEND) for rank in range(group.size())][here]
        shape, names = torch.arange(group.size()).view(-1, 1), ("replicate", "shard")
        mesh = DeviceMesh.from_group([group, alone], "cpu", mesh=shape, mesh_dim_names=names)
    else:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with mock.patch.object(_fully_shard, "_get_device_from_mesh", lambda mesh: DEVICE):
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    attachment = gradwire.attach(model, *([] if hook is None else HOOKS[hook](None)), **options)

    def step():
        model.zero_grad()
        model(torch.ones(4, 16)).sum().backward()
        with torch.no_grad():
            for each in model.parameters():
                each.grad.abs()
                each.mul_(1)  # the gradients are garbage, and parameters must stay equal on all ranks

    for _ in range(STEPS):
        step()
    if fails_at is not None or fails_in_wait:
        dist.barrier()  # the peers notice it in the same step
        Stream.checker.fails_at = fails_at
        with suppress(Fault, RuntimeError), ExitStack() as patches:  # or the peer's error comes first
            if fails_in_wait:
                patches.enter_context(mock.patch.object(reduce_scatter_of_shards, "wait_for", _fails))
            step()
        Stream.checker.fails_at = None
        model.zero_grad()
        torch.ones(MATRIX)
        if detaches:
            attachment.detach()
        else:
            attachment.resynchronize()
        for _ in range(LATER):
            step()
    dist.barrier()  # until the last rank has made its last step


# --- the tables: scenarios by name. Those of the first three are called with a hook.

SOME = ("none", "fp16", "int4", "powersgd", "powersgd_int8", "powersgd_alternating", "scaled_fp16", "fp16_of_int4")
WITH_MEMORY = SOME[2:]

TRAININGS = {
    "gradients zeroed in place": partial(plain, set_to_none=False),
    "views zeroed in place": partial(plain, set_to_none=False, gradient_as_bucket_view=True),
    "a vector in each bucket": partial(plain, **VECTORS),
    "static graph": partial(plain, static_graph=True),
    "drift check": partial(plain, check_every=3),
    "accumulation": accumulation,
    "accumulation into views": partial(accumulation, gradient_as_bucket_view=True),
    "two backwards": two_backwards,
    "unused parameters": unused_parameters,
    "joined rank": joined_rank,
    "buffers": buffers,
    "two models": two_models,
    "a user's stream": partial(users_streams, n_streams=1),
    "two streams in turn": partial(users_streams, n_streams=2),
    "CUDA graph": graph,
}
_BETWEEN = (drop_memory, save_and_load, save, assign_option, follow_scaler, observe)
ACTS = {act.__name__: partial(between, act=act) for act in _BETWEEN}
ERRORS = {
    "in a backward, one bucket in flight": partial(error_in_backward, at=4),
    "in a backward, two buckets in flight": partial(error_in_backward, at=1),
    "in a backward into views": partial(error_in_backward, at=1, gradient_as_bucket_view=True),
    "in a backward, gradients zeroed in place": partial(error_in_backward, at=1, set_to_none=False),
    "in the first collective": partial(error_in_collective, at=0),
    "in the second collective": partial(error_in_collective, at=1),
    "in the third collective": partial(error_in_collective, at=2),
    "in a collective, then wrapped again": partial(error_in_collective, at=1, recover=wrap_again),
    "in a collective of a joined rank": partial(joined_rank, fails_at=1),
    "in a joined rank, three buckets in flight": partial(joined_rank, fails_after_launches=True),
}
COLLECTIVES = {
    **{f"all_reduce, {wire}": partial(calls, all_reduce, wire) for wire in ("int4", "bf16", "fp16", "fp32")},
    "all_reduce, memory": partial(calls, all_reduce, "int4", with_memory=True),
    "all_reduce_coalesced": partial(calls, coalesced),
    "all_reduce_coalesced, memory": partial(calls, coalesced, with_memory=True),
    "reduce_scatter": partial(calls, reduce_scatter, False),
    "reduce_scatter, memory": partial(calls, reduce_scatter, False, with_memory=True),
    "reduce_scatter, source dropped in flight": partial(calls, reduce_scatter, True),
    **{
        f"{call.__name__}, {name}": partial(calls, call, op)
        for call in (several_in_flight, tensors_dropped_in_flight, handles_dropped)
        for name, op in (("AVG", dist.ReduceOp.AVG), ("SUM", dist.ReduceOp.SUM))
    },
}
SHARDED = {
    **{f"shards, {wire}": partial(sharded, False, within=wire) for wire in ("int8", "int4")},
    **{f"replicas, {hook}": partial(sharded, True, hook) for hook in SOME[1:]},
    "shards, int4, error": partial(sharded, False, within="int4", fails_at=0),
    **{f"replicas, {hook}, error": partial(sharded, True, hook, fails_at=0) for hook in SOME[1:]},
}


def run(scenario, *arguments, **options):
    """Call a scenario on this rank; returns the `Checker` of it."""
    happens_before.install_gpu()
    with mock.patch.object(plans, "WARM_UP_STEPS", WARM_UP_STEPS), happens_before.checking() as checker:
        scenario(*arguments, **options)
        gc.collect()
    return checker
