"""Cases of the GPU lane: the hooks and both DDPs on every rank of the default process group.

A case is a function of the device, called on all ranks; it raises if the property in its name does not hold.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from gradwire.bench.emulated import emulated_link, wire_seconds
from gradwire.bench.gpu.case import LaneCase, Skipped, require
from gradwire.bench.gpu.training import (
    DropoutNet,
    HalfNet,
    Net,
    OurDDP,
    StateAndHook,
    assert_equal_on_all_ranks,
    assert_same,
    register,
    take_step,
    train,
    wrap,
)
from gradwire.bench.implementations import TorchDDP, check_hook
from gradwire.bench.namespaces import Rate
from gradwire.bench.timing import timed
from gradwire.comm import connections_of
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.compress import Step
from gradwire.exchange import plans
from gradwire.exchange.bucket import Bucket, GradBucket
from gradwire.exchange.decorators import zero_copy
from gradwire.exchange.plans import WARM_UP_STEPS
from gradwire.exchange.reduction import reduce_bucket
from gradwire.exchange.settings import settings_of
from gradwire.hooks import default_hooks
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.kernels import WIRE_FORMATS
from gradwire.planner import hook_registry
from gradwire.planner.hook_registry import HookEntry


def _powersgd(hook: Callable[..., Any] = powerSGD_hook, rank: int = 4, **options: Any) -> Callable[[], StateAndHook]:
    """A PowerSGD hook that compresses matrices of every size from the third step on."""
    return lambda: (PowerSGDState(None, rank, 2, 1, **options), hook)


POWERSGD: dict[str, dict[str, Any]] = {
    "powersgd": {},
    "powersgd, rank 32": {"rank": 32},
    "powersgd, bf16 factors": {"factor_dtype": torch.bfloat16},
    "powersgd, int8 factors": {"factor_wire": "int8"},
    "powersgd, alternating": {"alternating": True},
    "powersgd, batched": {"hook": batched_powerSGD_hook},
}


def _quantized(wire: str, **options: Any) -> Callable[[], StateAndHook]:
    """A quantized hook from the third step on."""
    return lambda: (QuantizationState(None, wire, **options), quantization_hook)


def _registered(entry: HookEntry) -> Callable[[], StateAndHook]:
    return lambda: entry.make(None, 2) or (None, default_hooks.allreduce_hook)


# Each makes a new state and hook: states and wrappers keep memory between steps. The registry's PowerSGD hooks would
# leave small matrices uncompressed.
HOOKS: dict[str, Callable[[], StateAndHook]] = {
    **{
        name: _registered(entry)
        for name, entry in hook_registry.HOOKS.items()
        if name not in ("none", "noop") and not name.startswith("powersgd")
    },
    "fp16 of allreduce": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "scaled-bf16": lambda: (ScaledCastState(dtype=torch.bfloat16), scaled_cast_hook),
    **{f"quantized {name}": _quantized(name) for name, wire in WIRE_FORMATS.items() if not wire.is_scaled},
    "int4, bf16 errors": _quantized("int4", error_dtype=torch.bfloat16),
    **{name: _powersgd(**options) for name, options in POWERSGD.items()},
    "fp16 of powersgd": _powersgd(default_hooks.fp16_compress_wrapper(powerSGD_hook)),
}
# Steps before a capture: PyTorch requires 11, so that no first allocation or timing falls into the capture.
STEPS_BEFORE_CAPTURE = 11
# Without "powersgd, alternating": its consecutive steps differ, and a graph replays one step.
CAPTURED = ("allreduce", "fp16", "scaled-fp16", "int4", "powersgd")
_int4 = partial(_quantized, "int4")
# Hooks whose steps are recorded: hook, options and net. Without a cold start, which has operators of PyTorch.
REPLAYED: dict[str, tuple[Callable[..., Callable[[], StateAndHook]], dict[str, Any], type[Net | HalfNet]]] = {
    **{name: (_powersgd, options, Net) for name, options in POWERSGD.items()},
    "powersgd, fp16 gradients": (_powersgd, {}, HalfNet),
    "powersgd, dropout": (_powersgd, {}, DropoutNet),
    "int4": (_int4, {}, Net),
    "int4, bf16 errors": (_int4, {"error_dtype": torch.bfloat16}, HalfNet),
}


def no_hook_matches_pytorch(device: torch.device) -> None:
    """Our DDP without a hook gives the gradients of PyTorch's."""
    for view in (False, True):
        _, ours = train(OurDDP, device, gradient_as_bucket_view=view)
        _, theirs = train(TorchDDP, device, gradient_as_bucket_view=view)
        assert_same(ours, theirs, f"gradient_as_bucket_view={view}")


def hook_gives_equal_bits(name: str, device: torch.device) -> None:
    """A hook gives the same gradients on both DDPs, in two runs, and on all ranks."""
    for net in (Net, HalfNet):
        _, theirs = train(TorchDDP, device, HOOKS[name](), net)
        for view in (False, True):
            _, ours = train(OurDDP, device, HOOKS[name](), net, gradient_as_bucket_view=view)
            assert_same(ours, theirs, f"{net.__name__}, gradient_as_bucket_view={view}")
        assert_equal_on_all_ranks(theirs, net.__name__)


def hook_does_not_wait_on_the_host(name: str, device: torch.device) -> None:
    """A step in the steady state does not synchronize the host with the GPU."""
    model, _ = train(OurDDP, device, HOOKS[name]())
    batch = Net.batch(torch.Generator().manual_seed(0)).to(device)
    for _ in range(6):  # the buckets are rebuilt and every table is uploaded
        take_step(model, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        take_step(model, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if device.type != "cuda":
        raise Skipped("the step ran; only a GPU shows whether the host waits")


def hook_replays_from_a_cuda_graph(name: str, device: torch.device) -> None:
    """A step, captured once and replayed on other batches, gives the gradients of a model that is not captured."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [HalfNet.batch(generator).to(device) for _ in range(STEPS_BEFORE_CAPTURE + 3)]

    def model_after_warm_up() -> TorchDDP:
        torch.manual_seed(0)
        model = wrap(OurDDP, HalfNet(), device)
        register(model, *HOOKS[name]())
        for batch in batches[:STEPS_BEFORE_CAPTURE]:
            take_step(model, batch)
        return model

    eager = model_after_warm_up()
    stream = torch.cuda.Stream(device)  # the capture needs a warm-up on a stream that is not the default one
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        captured = model_after_warm_up()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize()

    batch = batches[STEPS_BEFORE_CAPTURE].clone()
    graph = torch.cuda.CUDAGraph()
    captured.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured(batch).square().mean().backward()
    for step, following in enumerate(batches[STEPS_BEFORE_CAPTURE:]):
        batch.copy_(following)
        graph.replay()
        take_step(eager, following)
        for mine, other in zip(captured.parameters(), eager.parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None
            # Not to the bit: a capture may give a matrix product another workspace.
            is_close = torch.allclose(mine.grad, other.grad, rtol=2**-7, atol=1e-4)
            off = (mine.grad - other.grad).abs().sum().item()
            require(is_close, f"step {step} after the capture, {tuple(mine.shape)}: off by {off} in total")
        if device.type != "cuda":
            break  # in a rehearsal the step ran as it was captured, and a replay does nothing
    torch.cuda.synchronize()
    graph.reset()
    if device.type != "cuda":
        raise Skipped("the step ran; only a GPU captures it")


def replays_give_the_bits_of_eager_steps(name: str, device: torch.device) -> None:
    """Recorded steps are repeated, and every step has the same bits as without."""
    make, options, net = REPLAYED[name]
    steps = 2 * WARM_UP_STEPS + 8  # an alternating hook records both kinds of steps
    for wrapper in (OurDDP, TorchDDP):
        with mock.patch.object(plans, "WARM_UP_STEPS", steps):
            _, eager = train(wrapper, device, make(**options)(), net, steps)
        with mock.patch.object(StreamExecutor, "replay", autospec=True, side_effect=StreamExecutor.replay) as replay:
            _, replayed = train(wrapper, device, make(**options)(), net, steps)
        if device.type == "cuda":  # in a rehearsal, CPU kernels are not recorded
            require(replay.call_count > 0, f"{wrapper.__name__}: no step was replayed")
        assert_same(replayed, eager, wrapper.__name__)


def hook_gives_the_mean(name: str, device: torch.device) -> None:
    """A hook of the registry gives the mean within the rounding of its wire dtype, or keeps what it drops as error."""
    check_hook(name, device)


def no_flat_buffer_is_allocated(device: torch.device) -> None:
    """A zero-copy hook allocates no flat buffer."""
    model, _ = train(OurDDP, device, HOOKS["fp16"]())
    assert isinstance(model, OurDDP)
    is_flat = [getattr(bucket, "_buffer", None) is not None for bucket in model.reducer.buckets]
    require(not any(is_flat), f"buckets with a flat buffer: {is_flat}")


@zero_copy
def _mean_then_mean_of_squares(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    async def algorithm(step: Step) -> None:
        wire = step.workspace.wire(step.source.table.numel, torch.float32)
        step.source.flatten(wire, scale=1 / step.transport.world_size)
        await step.transport.all_reduce(wire)
        wire.square_()
        await step.transport.all_reduce(wire)
        step.target.unflatten(wire)

    return reduce_bucket(connections_of(None), Bucket.of(bucket), algorithm, settings_of("mean_then_mean_of_squares"))


def two_collectives_of_a_bucket_stay_in_order(device: torch.device) -> None:
    """A hook that awaits two all-reduces of each bucket."""
    _, exact = train(TorchDDP, device)
    _, ours = train(OurDDP, device, (None, _mean_then_mean_of_squares))
    _, theirs = train(TorchDDP, device, (None, _mean_then_mean_of_squares))
    assert_same(ours, theirs, "both DDPs")
    for mine, mean in zip(ours, exact, strict=True):
        for a, b in zip(mine, mean, strict=True):
            torch.testing.assert_close(a, dist.get_world_size() * b.square())


def scaled_cast_keeps_tiny_gradients(device: torch.device) -> None:
    """Gradients below fp16's smallest number arrive, and a NaN reaches every rank and leaves the scale."""
    module = nn.Linear(100, 100, bias=False)
    model = wrap(OurDDP, module, device)
    state = ScaledCastState()
    model.register_comm_hook(state, scaled_cast_hook)
    batch = torch.full((1, 100), 1e-9, device=device)
    for _ in range(3):
        model.zero_grad()
        model(batch).sum().backward()
    torch.testing.assert_close(module.weight.grad, batch.expand(100, 100), rtol=2**-10, atol=0)
    require(state.skipped_steps == state.nonfinite_elements == 0, "finite gradients were counted as not finite")
    batch.fill_(float("nan"))
    exponents = state.exponents()
    model.zero_grad()
    model(batch).sum().backward()
    assert module.weight.grad is not None
    require(module.weight.grad.isnan().all(), "a NaN did not arrive")
    require(state.exponents() == exponents, "a NaN moved the scale")
    require(state.skipped_steps == 1, f"{state.skipped_steps} steps with a NaN, expected 1")


def powersgd_survives_a_nonfinite_gradient(device: torch.device) -> None:
    """An inf on one rank is NaN on all, and leaves errors and factors as they were."""
    module = nn.Linear(300, 200, bias=False)
    model = wrap(OurDDP, module, device)
    state = PowerSGDState(None, 4, 2, 1)
    register(model, state, powerSGD_hook)
    batch = torch.randn(8, 300, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(4):
        take_step(model, batch)
    memory = state.memory
    before = {entry: memory.tensors(entry)["weight"].clone() for entry in memory.declared if memory.tensors(entry)}
    bad = batch.clone()
    if dist.get_rank() == dist.get_world_size() - 1:
        bad[0, 0] = float("inf")
    take_step(model, bad)
    assert module.weight.grad is not None
    require(module.weight.grad.isnan().all(), "the gradient is not NaN on all ranks")
    after = {entry: memory.tensors(entry) for entry in memory.declared}
    require(torch.equal(after["errors"]["weight"], before["errors"]), "the error memory changed")
    require(torch.equal(after["q"]["weight"], before["q"]), "the factors changed")
    take_step(model, batch)
    require(module.weight.grad.isfinite().all(), "the next gradient is not finite")


def gradscaler_skips_the_step_of_an_overflow(device: torch.device) -> None:
    """An inf on one rank leaves the parameters of all as they were; the next step changes them."""
    torch.manual_seed(0)
    module = Net()
    model = wrap(OurDDP, module, device)
    register(model, *HOOKS["fp16"]())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler(device.type, init_scale=1024)

    def step(batch: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return [parameter.detach().clone() for parameter in module.parameters()]

    batch = Net.batch(torch.Generator().manual_seed(dist.get_rank())).to(device)
    before, bad = step(batch), batch.clone()
    if dist.get_rank() == dist.get_world_size() - 1:
        bad[0, 0, 0, 0] = torch.inf
    skipped, after = step(bad), step(batch)
    require(all(map(torch.equal, before, skipped)), "the step of the overflow changed the parameters")
    require(scaler.get_scale() == 512, f"the scale is {scaler.get_scale()}, expected 512")
    require(not all(map(torch.equal, skipped, after)), "the next step changed nothing")
    require(all(parameter.isfinite().all() for parameter in after), "parameters are not finite")


def compiled_model_has_the_gradients_of_the_model(device: torch.device) -> None:
    """`torch.compile` of a DDP with a hook."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    gradients = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = wrap(OurDDP, Net(), device, bucket_cap_mb=25)  # torch.compile refuses caps below the first bucket's
        register(model, *HOOKS["fp16"]())
        called = torch.compile(model, backend=backend) if is_compiled else model
        for seed in range(3):
            model.zero_grad()
            called(Net.batch(torch.Generator().manual_seed(seed)).to(device)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=2**-6, atol=1e-4)


def powersgd_launches_a_dozen_kernels_for_each_bucket(device: torch.device) -> None:
    """The number of Triton kernels of a step, by the profiler."""
    if device.type != "cuda":
        raise Skipped("counts kernels in a profile of a GPU")
    model, _ = train(OurDDP, device, HOOKS["powersgd"]())
    batch = Net.batch(torch.Generator().manual_seed(0)).to(device)
    for _ in range(4):
        take_step(model, batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        take_step(model, batch)
        torch.cuda.synchronize()
    assert isinstance(model, OurDDP)
    launches = [event.name for event in profile.events() if event.name.lstrip("_").endswith("_kernel")]
    print(len(model.reducer.buckets), "buckets:", launches)
    # project and its sum, orthogonalize (1 to 6), backproject and its sum, norms, reconstruct
    require(0 < len(launches) <= 12 * len(model.reducer.buckets), f"{len(launches)} launches: {launches}")


def wrapped_hooks_of_pytorch_run(device: torch.device) -> None:
    """Our wrapper around PyTorch's hook gives the gradients of PyTorch's wrapper, also if results arrive late."""
    _, exact = train(TorchDDP, device, (None, torch_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook)))
    for hook in (torch_hooks.allreduce_hook, _late_all_reduce):
        for wrapper in (OurDDP, TorchDDP):
            _, ours = train(wrapper, device, (None, default_hooks.fp16_compress_wrapper(hook)))
            assert_same(ours, exact, f"{wrapper.__name__}, {hook.__name__}")


def _late_all_reduce(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """PyTorch's hook, whose results arrive after the device has begun to work on the next buckets."""

    def late(future: torch.futures.Future[Tensor]) -> Tensor:
        torch.cuda._sleep(10_000_000)
        return future.value()

    return torch_hooks.allreduce_hook(group, bucket).then(late)


def emulated_link_takes_its_time_and_changes_no_bit(device: torch.device) -> None:
    """On an emulated link, collectives take longer and give the same results."""
    if device.type != "cuda":
        raise Skipped("the model of a link spins on a GPU")
    rate = Rate.parse("1gbit")
    tensor = torch.ones(1_000_000, device=device)
    for async_op in (False, True):
        with emulated_link(rate, 2, device):

            def all_reduce(async_op: bool = async_op) -> None:
                work = dist.all_reduce(tensor, async_op=async_op)
                if work is not None:
                    require(work.get_future().wait()[0] is tensor, "the future holds another tensor")
                    work.wait()

            seconds, least = timed(all_reduce, device).seconds, 0.5 * wire_seconds(tensor.nbytes, rate, 2)
            require(seconds > least, f"an all-reduce took {seconds} s, expected at least {least}")
    for name in ("fp16", "int4", "powersgd, bf16 factors"):
        _, plain = train(OurDDP, device, HOOKS[name]())
        with emulated_link(rate, 2, device):
            _, ours = train(OurDDP, device, HOOKS[name]())
            _, theirs = train(TorchDDP, device, HOOKS[name]())
        assert_same(ours, plain, name)
        assert_same(theirs, plain, name)
    with emulated_link(rate, 2, device):
        _, theirs = train(TorchDDP, device, (None, torch_hooks.fp16_compress_hook))
    assert_same(theirs, train(TorchDDP, device, (None, torch_hooks.fp16_compress_hook))[1], "PyTorch's hook")


HOOK_CHECKS: dict[str, LaneCase] = {
    "no hook: PyTorch's gradients": no_hook_matches_pytorch,
    **{f"{name}: equal bits on both DDPs": partial(hook_gives_equal_bits, name) for name in HOOKS},
    **{f"{name}: gives the mean": partial(hook_gives_the_mean, name) for name in hook_registry.HOOKS if name != "noop"},
    **{f"{name}: no host synchronization": partial(hook_does_not_wait_on_the_host, name) for name in HOOKS},
    **{f"{name}: replays from a CUDA graph": partial(hook_replays_from_a_cuda_graph, name) for name in CAPTURED},
    **{
        f"{name}: replays give the bits of eager steps": partial(replays_give_the_bits_of_eager_steps, name)
        for name in REPLAYED
    },
    **{
        case.__name__.replace("_", " "): case
        for case in (
            no_flat_buffer_is_allocated,
            two_collectives_of_a_bucket_stay_in_order,
            scaled_cast_keeps_tiny_gradients,
            gradscaler_skips_the_step_of_an_overflow,
            compiled_model_has_the_gradients_of_the_model,
            powersgd_survives_a_nonfinite_gradient,
            powersgd_launches_a_dozen_kernels_for_each_bucket,
            wrapped_hooks_of_pytorch_run,
            emulated_link_takes_its_time_and_changes_no_bit,
        )
    },
}
