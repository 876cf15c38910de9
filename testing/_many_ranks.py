"""Many ranks in one process: their algorithms run side by side, collective by collective."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Algorithm, Collective, Driver, Transport, Workspace, connections_of
from gradwire.comm.executor import Executor, Task
from gradwire.comm.transport import AllGather, AllReduce, AllToAll
from gradwire.exchange.hook_state import HookState
from gradwire.reducer.bucket import BucketSpec, DenseBucket
from gradwire.testing._cases import Case, Model

CPU = torch.device("cpu")
SIMULATED = 8  # ranks that run; all others send what the last of these sends


def run_in_lockstep(algorithms: Sequence[Algorithm[Any]], *, world_size: int | None = None) -> list[Any]:
    """Run one algorithm for each rank to its end; returns their results.

    With a ``world_size``, there are further ranks, which send what the last one with an algorithm sends.
    """
    drivers, n_others = [Driver(algorithm) for algorithm in algorithms], (world_size or 0) - len(algorithms)
    while True:
        awaited = [collective for driver in drivers if (collective := driver.advance()) is not None]
        if not awaited:
            return [driver.result for driver in drivers]
        assert len(awaited) == len(drivers), "some ranks have ended"
        assert len({type(collective) for collective in awaited}) == 1, "the ranks await different collectives"
        _run(awaited, max(0, n_others))


def _run(awaited: Sequence[Collective], n_others: int) -> None:
    _reduce([each for each in awaited if isinstance(each, AllReduce)], n_others)
    _exchange([each for each in awaited if isinstance(each, AllToAll | AllGather)], n_others)


def _reduce(reductions: Sequence[AllReduce], n_others: int) -> None:
    for tensors in zip(*(each.tensors for each in reductions), strict=True):
        stacked = torch.stack(tensors)
        if reductions[0].op == dist.ReduceOp.MAX:
            reduced = stacked.amax(0)
        elif n_others == 0:
            reduced = stacked.sum(0, dtype=stacked.dtype)
        else:  # exact, and then in the range of the dtype: too large integers wrap around, others become inf
            wide = stacked.to(torch.float64 if stacked.is_floating_point() else torch.int64)
            reduced = wide.sum(0).add_(wide[-1], alpha=n_others).to(stacked.dtype)
        for tensor in tensors:
            tensor.copy_(reduced)


def _exchange(shots: Sequence[AllToAll | AllGather], n_others: int) -> None:
    for rank, shot in enumerate(shots):
        peers, period = list(range(len(shots) + n_others)), 1
        if shot.part is not None:
            peers = [peer for peer, n in enumerate(shot.part.splits) if n]
            period = len(peers) if shot.part.is_in_node or len(peers) == 1 else peers[1] - peers[0]
        member = peers.index(rank)
        sources = torch.stack([each.source[:, member] if isinstance(each, AllToAll) else each.source for each in shots])
        # The others send what the last rank with their place on the node sends.
        senders = [peer - max(0, -(-(peer - len(shots) + 1) // period)) * period for peer in peers]
        if min(senders) < 0:
            raise NotImplementedError(
                f"Nodes of {period} ranks are not simulated; expected up to {len(shots)}. Pass skip=['sums fit']."
            )
        shot.target.copy_(sources[senders].movedim(0, 1))


class _Rank(Executor):
    """The executor of one of many ranks, which collects the tasks of a step."""

    def __init__(self, world_size: int, rank: int) -> None:
        super().__init__(Transport(world_size, rank), [Workspace(CPU)])
        self.tasks: list[tuple[Algorithm[Any], Tensor | None, Future[Any]]] = []  # with `Task.result`

    def submit(self, task: Task) -> Future[Any]:
        """Start the task's algorithm, whose first collective `run_in_lockstep` runs."""
        future: Future[Any] = Future()
        self.tasks.append((task.begin(self.workspaces[0]), task.result, future))
        return future


def _bucket(model: Model, names: list[str], gradients: Iterable[Tensor]) -> DenseBucket:
    """All parameters of a model in one bucket, flat as PyTorch's."""
    parameters: list[Tensor] = [*model.parameters()]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    spec = BucketSpec(index=0, is_last=True, parameters=parameters, names=names, model_parameters=parameters)
    bucket = DenseBucket(spec, as_view=False)
    bucket.collect(zero_copy=False)
    return bucket


def train_many(case: Case, ranks: int, steps: int, make_state: Callable[[], Any], hook: Any) -> list[Tensor]:
    """The flat reduced gradients of rank 0 in each of some steps on ``ranks`` ranks with the same gradients."""
    models = [Model(case) for _ in range(min(ranks, SIMULATED))]
    states, executors = [make_state() for _ in models], [_Rank(ranks, rank) for rank in range(len(models))]
    for state, model in zip(states, models, strict=True):
        if isinstance(state, HookState):
            state.bind(model)
    results = []
    for step in range(steps):
        futures = []
        for state, model, executor in zip(states, models, executors, strict=True):
            connections_of(None).replace_executor(executor, CPU)
            futures.append(hook(state, _bucket(model, case.names, case.gradients(0, step).values())))
        for tasks in zip(*(executor.tasks for executor in executors), strict=True):
            values = run_in_lockstep([algorithm for algorithm, _, _ in tasks], world_size=ranks)
            for (_, result, future), value in zip(tasks, values, strict=True):
                future.set_result(value if result is None else result)
        for executor in executors:
            executor.tasks.clear()
        value = futures[0].wait()
        results.append((value if isinstance(value, Tensor) else value[0]).clone())
    return results
