"""A rank of a training in which one rank meets a fault, as a program. Prints one line of JSON for every applied step.

The fault is an exception, or a signal that the process sends itself, at a place in one step.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import fork_server  # noqa: F401 - makes `tests` importable
import torch
import torch.distributed as dist

from gradwire.exchange.handshake import digest
from gradwire.hooks import default_hooks
from tests.support.training import HOOKS, Fault, build, gradients, register, wrapped

START_LIMIT = timedelta(minutes=5)
RESUME_LIMIT_S = 120
HANG_S = 200  # then the stacks of all threads are written


def meet(how):
    """Meet the fault: an exception, or the signal of that name."""
    if how == "exception":
        raise Fault("planted")
    os.kill(os.getpid(), getattr(signal, how))


class Meeting(torch.autograd.Function):
    """The identity, in whose backward the fault is met."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        meet(ctx.how)
        return gradient, None


class FaultyHook:
    """A hook around another, which meets the fault at its ``place`` while it is armed."""

    def __init__(self, hook, how, place):
        self.hook, self.how, self.place, self.is_armed = hook, how, place, False

    def __call__(self, state, bucket):
        if self.is_armed and self.place == "before an exchange" and bucket.index() == 1:
            meet(self.how)
        future = self.hook(state, bucket)
        if self.is_armed and self.place == "after an exchange" and bucket.index() == 1:
            future.wait()
            meet(self.how)
        if self.is_armed and self.place == "end of the backward" and bucket.is_last():
            torch.autograd.Variable._execution_engine.queue_callback(lambda: meet(self.how))
        return future


@contextmanager
def armed(ddp, optimizer, hook, how, place):
    """Let this rank meet the fault at its place."""
    layer = ddp.module.layers[2]
    with ExitStack() as stack:
        if place == "forward":
            stack.callback(layer.register_forward_pre_hook(lambda *_: meet(how)).remove)
        elif place == "backward":
            stack.callback(layer.register_forward_hook(lambda *arguments: Meeting.apply(arguments[-1], how)).remove)
        elif place == "optimizer":
            stack.callback(optimizer.register_step_pre_hook(lambda *_: meet(how)).remove)
        hook.is_armed = True
        stack.callback(setattr, hook, "is_armed", False)
        yield


def batch(model, step, rank):
    return model.batch(torch.Generator().manual_seed(1000 * step + rank))


def exact_mean(model, step):
    """The mean of all ranks' gradients, by parameter name, computed without DDP."""
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        model(*batch(model, step, rank)).backward()
        for name, gradient in gradients(model).items():
            total[name] += gradient.double() / dist.get_world_size()
    return total


def relative_error(found, exact):
    """The largest relative error of a parameter's gradient, by its norm."""
    return max(float((found[name].double() - each).norm() / each.norm()) for name, each in exact.items())


def main(*, wrapper, hook, how, place, victim, at, steps, timeout_s, resumes=False):
    """Train; rank ``victim`` meets the fault in step ``at``. With ``resumes``, resynchronize after an error."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANG_S)
    # A job in the background of a shell ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # PyTorch may take longer to be imported than a collective may take.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, rank == 0, timeout=START_LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    dist.barrier()
    store.set_timeout(timedelta(seconds=timeout_s))  # as for a store that `init_process_group` makes
    state, inner = (None, default_hooks.allreduce_hook) if hook == "none" else HOOKS[hook](None)
    faulty = FaultyHook(inner, how, place)
    ddp, local = wrapped(wrapper), build("mlp")
    register(ddp, (state, lambda state, bucket: faulty(state, bucket)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    step = 0
    while step < steps:
        is_met = how is not None and (step, rank) == (at, victim)
        local.load_state_dict(ddp.module.state_dict())
        exact = exact_mean(local, step)
        optimizer.zero_grad()
        try:
            with armed(ddp, optimizer, faulty, how, place) if is_met else ExitStack():
                loss = ddp(*batch(ddp.module, step, rank))
                if is_met and place == "loss":
                    meet(how)
                loss.backward()
                optimizer.step()
        except RuntimeError as error:
            if not resumes:
                raise
            print(json.dumps({"raised": str(error)}), flush=True)
            step = resume(ddp, step)
            continue
        found = gradients(ddp)
        facts = {"step": step, "gradients": digest(found), "parameters": digest(ddp.module.state_dict())}
        print(json.dumps(facts | {"error": relative_error(found, exact)}), flush=True)
        if place == "state_dict" and hasattr(state, "state_dict"):
            if is_met:
                meet(how)
            state.state_dict()
        step += 1
    dist.destroy_process_group()


def resume(ddp, step):
    """Continue on all ranks with the parameters of rank 0, once they are back; returns the number of the next step."""
    deadline = time.monotonic() + RESUME_LIMIT_S
    while True:
        try:
            ddp.resynchronize(from_rank=0)
            break
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
    steps = torch.tensor(step + 1)
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    return steps.item()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
