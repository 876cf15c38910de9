"""One rank of test_hooks_on_gpu.py: ``python rank.py CASE RANK WORLD_SIZE RENDEZVOUS``; exits with 0 if it holds."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

import gradwire
from gradwire.bench.emulated import emulated_link, wire_seconds
from gradwire.bench.measuring import timed
from gradwire.bench.namespaces import Rate
from gradwire.hooks import default_hooks, scaled_cast_hooks
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.reduce import in_place, reduce_bucket
from gradwire.kernels import flatten, unflatten

DEVICE = torch.device("cuda", 0)
TorchDDP = nn.parallel.DistributedDataParallel


def powersgd(hook=powerSGD_hook, rank=4, **options):
    return lambda: (PowerSGDState(None, rank, 2, 1, **options), hook)


HOOKS = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "fp16 of allreduce": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "scaled": lambda: (scaled_cast_hooks.ScaledCastState(), scaled_cast_hooks.scaled_cast_hook),
    "powersgd": powersgd(),
    "powersgd, rank 32": powersgd(rank=32),
    "powersgd, bf16 factors": powersgd(factor_dtype=torch.bfloat16),
    "powersgd, alternating": powersgd(alternating=True),
    "powersgd, batched": powersgd(batched_powerSGD_hook),
    "fp16 of powersgd": powersgd(default_hooks.fp16_compress_wrapper(powerSGD_hook)),
}


class Net(nn.Module):
    """Convolutions in channels_last, odd sizes, a scalar, and linear layers of more than one chunk."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 13, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(13)
        self.linear = nn.Linear(13 * 36, 301)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(301, 17)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.out(torch.tanh(self.linear(x.flatten(1)))) * self.scale


def train(wrap, hook=None, steps=4, **options):
    """Gradients of every step. Equal seeds and equal batches for both reducers, other batches on each rank."""
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    model = wrap(Net().to(DEVICE), device_ids=[0], bucket_cap_mb=0.1, **options)
    if hook is not None:
        model.register_comm_hook(*hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    taken = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 3, 8, 8, generator=generator).to(DEVICE)).square().mean().backward()
        taken.append([parameter.grad.clone() for parameter in model.parameters()])
    return model, taken


def assert_same(ours, theirs):
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for i, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert torch.equal(a, b), f"step {step}, parameter {i}: {(a - b).abs().max().item()}"


def no_hook_matches_pytorch():
    for view in (False, True):
        _, ours = train(gradwire.DistributedDataParallel, gradient_as_bucket_view=view)
        _, theirs = train(TorchDDP, gradient_as_bucket_view=view)
        assert_same(ours, theirs)


def hooks_match_on_both_reducers():
    for make in HOOKS.values():
        _, theirs = train(TorchDDP, make())
        for view in (False, True):
            _, ours = train(gradwire.DistributedDataParallel, make(), gradient_as_bucket_view=view)
            assert_same(ours, theirs)


def cast_hooks_match_the_mean():
    _, exact = train(TorchDDP)
    for name, rounding in (("fp16", 2**-11), ("bf16", 2**-8), ("scaled", 2**-11)):
        _, rounded = train(gradwire.DistributedDataParallel, HOOKS[name]())
        for mine, other in zip(rounded, exact, strict=True):
            for a, b in zip(mine, other, strict=True):
                # One rounding of each contribution, one of each partial sum; the floor is fp16's subnormal step.
                bound = rounding * (dist.get_world_size() + 1) * b.abs().max() + 2**-23
                assert (a - b).abs().max() <= bound, name


def steps_do_not_synchronise_with_the_host():
    for name, make in HOOKS.items():
        model, _ = train(gradwire.DistributedDataParallel, make())
        batch = torch.randn(4, 3, 8, 8, device=DEVICE)
        for _ in range(6):  # the buckets are rebuilt and every table is uploaded
            model.zero_grad()
            model(batch).square().mean().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.zero_grad()
            model(batch).square().mean().backward()
        except RuntimeError as error:
            raise AssertionError(f"{name}: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")


def no_flat_buffer_is_allocated():
    model, _ = train(gradwire.DistributedDataParallel, HOOKS["fp16"]())
    assert all(bucket._buffer is None for bucket in model.reducer.buckets)


@in_place
def mean_then_mean_of_squares(state, bucket):
    async def algorithm(source, target, transport, workspace):
        wire = workspace.wire(source.table.numel, torch.float32)
        flatten(source.tensors, wire, table=source.table, scale=1 / transport.world_size)
        await transport.all_reduce(wire)
        wire.square_()
        await transport.all_reduce(wire)
        unflatten(wire, target.tensors, table=target.table)

    return reduce_bucket(None, bucket, algorithm)


def two_collectives_per_bucket_stay_in_order():
    _, exact = train(TorchDDP)
    _, ours = train(gradwire.DistributedDataParallel, (None, mean_then_mean_of_squares))
    _, theirs = train(TorchDDP, (None, mean_then_mean_of_squares))
    assert_same(ours, theirs)
    for mine, mean in zip(ours, exact, strict=True):
        for a, b in zip(mine, mean, strict=True):
            torch.testing.assert_close(a, dist.get_world_size() * b.square())


def scaled_cast_keeps_tiny_gradients():
    model = gradwire.DistributedDataParallel(nn.Linear(100, 100, bias=False).to(DEVICE), device_ids=[0])
    state = scaled_cast_hooks.ScaledCastState()
    model.register_comm_hook(state, scaled_cast_hooks.scaled_cast_hook)
    batch = torch.full((1, 100), 1e-9, device=DEVICE)
    for _ in range(3):
        model.zero_grad()
        model(batch).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, batch.expand(100, 100), rtol=2**-10, atol=0)
    assert state.skipped_steps == state.nonfinite_elements == 0
    batch.fill_(float("nan"))
    exponents = state.exponents()
    model.zero_grad()
    model(batch).sum().backward()
    assert model.module.weight.grad.isnan().all()
    assert state.exponents() == exponents
    assert state.skipped_steps == 1


def powersgd_loses_nothing():
    """What all ranks put in is what came out of all steps and what is left in their errors, up to rounding."""
    for name in ("powersgd", "powersgd, rank 32", "powersgd, bf16 factors", "powersgd, alternating"):
        weight = nn.Linear(300, 200, bias=False).to(DEVICE)
        model = gradwire.DistributedDataParallel(weight, device_ids=[0])
        state, hook = HOOKS[name]()
        model.register_comm_hook(state, hook)
        generator = torch.Generator().manual_seed(dist.get_rank())
        balance = torch.zeros(200, 300, dtype=torch.float64, device=DEVICE)
        largest = 0.0
        for _ in range(20):
            model.zero_grad()
            # The gradient of the weight is the sum over the batch of one-hot rows times columns: the columns, exactly.
            columns = torch.randn(200, 300, generator=generator).to(DEVICE)
            (model(columns) * torch.eye(200, device=DEVICE)).sum().backward()
            balance += columns.double() - weight.weight.grad.double()
            largest = max(largest, columns.abs().max().item())
        balance -= state._memory.errors["weight"].double()
        dist.all_reduce(balance)
        # A step rounds the addition of the error and its subtraction, both of magnitudes below 100 gradients.
        bound = 20 * dist.get_world_size() * 2 * 2**-24 * 100 * largest
        assert balance.abs().max() <= bound, (name, balance.abs().max().item(), bound)
        assert state.compression_stats()[0] > 1, name


def powersgd_survives_a_nonfinite_gradient():
    model = gradwire.DistributedDataParallel(nn.Linear(300, 200, bias=False).to(DEVICE), device_ids=[0])
    state = PowerSGDState(None, 4, 2, 1)
    model.register_comm_hook(state, powerSGD_hook)
    batch = torch.randn(8, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for _ in range(4):
        model.zero_grad()
        model(batch).square().sum().backward()
    error = state._memory.errors["weight"].clone()
    factor = state._factors.q["weight"].clone()
    bad = batch.clone()
    if dist.get_rank() == dist.get_world_size() - 1:
        bad[0, 0] = float("inf")
    model.zero_grad()
    model(bad).square().sum().backward()
    assert model.module.weight.grad.isnan().all()
    assert torch.equal(state._memory.errors["weight"], error)
    assert torch.equal(state._factors.q["weight"], factor)
    model.zero_grad()
    model(batch).square().sum().backward()
    assert model.module.weight.grad.isfinite().all()


def powersgd_launches_a_dozen_kernels_for_each_bucket():
    model, _ = train(gradwire.DistributedDataParallel, HOOKS["powersgd"]())
    batch = torch.randn(4, 3, 8, 8, device=DEVICE)
    for _ in range(4):
        model.zero_grad()
        model(batch).square().mean().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model.zero_grad()
        model(batch).square().mean().backward()
        torch.cuda.synchronize()
    launches = [event.name for event in profile.events() if event.name.lstrip("_").endswith("_kernel")]
    print(len(model.reducer.buckets), "buckets:", launches)
    # flatten, project and its sum, orthogonalise (1 to 4), backproject and its sum, renew (2), reconstruct, unflatten
    assert 0 < len(launches) <= 13 * len(model.reducer.buckets)


def wrapped_hooks_of_pytorch_run():
    _, theirs = train(TorchDDP, (None, torch_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook)))
    _, ours = train(
        gradwire.DistributedDataParallel, (None, default_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook))
    )
    assert_same(ours, theirs)


def an_emulated_link_takes_its_time_and_changes_no_bit():
    rate = Rate.parse("1gbit")
    tensor = torch.ones(1_000_000, device=DEVICE)
    for async_op in (False, True):
        with emulated_link(rate, 2, DEVICE):

            def all_reduce(async_op=async_op):
                work = dist.all_reduce(tensor, async_op=async_op)
                if async_op:
                    assert work.get_future().wait()[0] is tensor
                    work.wait()

            assert timed(all_reduce, DEVICE) > 0.5 * wire_seconds(tensor.nbytes, rate, 2)
    for name in ("fp16", "powersgd, bf16 factors"):
        _, plain = train(gradwire.DistributedDataParallel, HOOKS[name]())
        with emulated_link(rate, 2, DEVICE):
            _, ours = train(gradwire.DistributedDataParallel, HOOKS[name]())
            _, theirs = train(TorchDDP, HOOKS[name]())
        assert_same(ours, plain)
        assert_same(theirs, plain)
    with emulated_link(rate, 2, DEVICE):
        _, theirs = train(TorchDDP, (None, torch_hooks.fp16_compress_hook))
    assert_same(theirs, train(TorchDDP, (None, torch_hooks.fp16_compress_hook))[1])


def main():
    case, rank, world_size, rendezvous = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, device_id=DEVICE
    )
    globals()[case]()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
