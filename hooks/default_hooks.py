"""Plain and 16-bit all-reduce, with the names of ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``.

Every hook averages over the ranks. PyTorch's fp16 hook casts and then divides by the world size. These hooks divide and
then cast, in one pass: gradients of 1e5 and 0 on two ranks give 5e4, not inf.
"""

from functools import partial

import torch
import torch.distributed as dist

from gradwire.compress import cast_all_reduce
from gradwire.exchange.bucket import Bucket, GradBucket, tensor_in
from gradwire.exchange.decorators import CommHook, ddp_hook, replayable, zero_copy
from gradwire.exchange.memory import StateDict
from gradwire.exchange.plans import replayed
from gradwire.exchange.reduction import all_reduce_on_cpu, check_local_size, quantized_reduction, reduce_bucket
from gradwire.exchange.settings import HookSettings, settings_of
from gradwire.validation import check_choice, check_keywords

__all__ = [
    "CastState",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

_BLOCK_NUMEL = 64  # fp32 accumulation distributes blocks of this size over the ranks; 16-bit formats have no scales


class CastState(HookSettings):
    """Options of `allreduce_hook`, `fp16_compress_hook` and `bf16_compress_hook`, in place of a process group.

    Like every hook state, it can measure the hook's steps: see `observe`.

    Args:
        process_group: the ranks to average over; None for the model's.
        accumulate: dtype of the sum over the ranks. "wire" sums in the dtype that the hook sends, with one all-reduce,
            as with a process group as the state. "fp32" sums in fp32 and rounds the sum once, so fp16 sums do not
            overflow and the rounding error does not grow with the world size. It sends as many bytes per rank, in two
            messages. Use it if sums overflow.
        local_size: number of ranks on each node, whose gradients "fp32" adds up before it sends them to other nodes;
            see `gradwire.hooks.quantization_hooks.QuantizationState`. With 1, a node of G ranks sends (G + 1) / 2 times
            as many bytes as with "wire", because NCCL's all-reduce adds up inside a node, too.

    Raises:
        TypeError: ``process_group`` is not a process group.
        ValueError: ``accumulate`` is neither "wire" nor "fp32", or ``local_size`` is neither "auto" nor a number.

    Examples:
        >>> model.register_comm_hook(CastState(process_group, accumulate="fp32"), bf16_compress_hook)
    """

    @check_keywords
    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        accumulate: str = "wire",
        local_size: int | str = "auto",
    ) -> None:
        check_choice("accumulate", accumulate, ("wire", "fp32"))
        super().__init__("", process_group)  # the name is that of the hook which is called
        check_local_size(local_size)
        self.accumulate, self.local_size = accumulate, local_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(accumulate={self.accumulate!r}, local_size={self.local_size!r})"

    def __getstate__(self) -> StateDict:
        """For pickling: the options, without the process group."""
        return {"accumulate": self.accumulate, "local_size": self.local_size}

    def __setstate__(self, state: StateDict) -> None:
        self.__init__(None, **state)  # type: ignore[misc]

    def _compared_options(self) -> dict[str, object]:
        return {"hook": self.hook_name, "accumulate": self.accumulate, "local_size": self.local_size}


def _cast_hook(
    state: dist.ProcessGroup | CastState | None, bucket: GradBucket, dtype: torch.dtype | None, hook: str
) -> torch.futures.Future[torch.Tensor]:
    settings: HookSettings
    if isinstance(state, CastState):
        state.hook_name = hook
        process_group, settings = state.process_group, state
    else:
        process_group, settings = state, settings_of(hook)
    if isinstance(state, CastState) and state.accumulate == "fp32":
        if dtype is None:
            raise ValueError(
                "accumulate is 'fp32', but allreduce_hook sends and sums the gradients in their own dtype. Use "
                "fp16_compress_hook or bf16_compress_hook, or accumulate='wire'."
            )
        wire = "fp16" if dtype == torch.float16 else "bf16"
        return quantized_reduction(process_group, bucket, wire, _BLOCK_NUMEL, state.local_size, settings)

    adapted = Bucket.of(bucket, settings.bucket_order)
    connections, telemetry = settings.handshake.agree(settings, adapted, process_group), settings.telemetry
    # All ranks measure, or none: the handshake compared it.
    if dtype is None and telemetry is None and not adapted.is_sparse and adapted.device.type == "cpu":
        return all_reduce_on_cpu(connections, adapted)
    algorithm = partial(cast_all_reduce, dtype=dtype)
    future = replayed(settings, adapted, connections, algorithm)
    return future if future is not None else reduce_bucket(connections, adapted, algorithm, settings)


@replayable
@ddp_hook(CastState, dist.ProcessGroup)
def allreduce_hook(
    process_group: dist.ProcessGroup | CastState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in their own dtype.

    Args:
        process_group: the ranks to average over, None for the model's; or a `CastState`, to measure steps.
        bucket: the gradients. Overwritten with their mean.

    Examples:
        >>> model.register_comm_hook(process_group, allreduce_hook)
    """
    return _cast_hook(process_group, bucket, None, "allreduce_hook")


@replayable
@ddp_hook(CastState, dist.ProcessGroup)
def fp16_compress_hook(
    process_group: dist.ProcessGroup | CastState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in fp16: half the bytes of fp32.

    Each rank sends ``fp16(g / world_size)``, saturated at +-65504. inf and NaN pass through, so that a
    gradient scaler sees them. A sum beyond 65504 becomes inf, unless the state is a `CastState` that
    accumulates in fp32. Magnitudes below 3e-8 times the world size become 0. If gradients may be that
    small, use bf16 or `gradwire.hooks.scaled_cast_hooks.scaled_cast_hook`.

    Args:
        process_group: the ranks to average over, None for the model's; or a `CastState`.
        bucket: the gradients. Overwritten with their mean.

    Examples:
        >>> model.register_comm_hook(process_group, fp16_compress_hook)
    """
    return _cast_hook(process_group, bucket, torch.float16, "fp16_compress_hook")


@replayable
@ddp_hook(CastState, dist.ProcessGroup)
def bf16_compress_hook(
    process_group: dist.ProcessGroup | CastState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in bf16: half the bytes of fp32, with its range, at 8 bits of precision.

    Gradients are divided by the world size in fp32, before the cast. NCCL's own average rounds
    1 / world_size to bf16 first, which is 0.2 % off at 3 ranks. The hook runs on every backend that
    sums bf16, including gloo. PyTorch's DDP rejects a hook of this name if PyTorch was built without
    NCCL and XCCL, as CPU builds are; gradwire's DDP accepts it.

    Args:
        process_group: the ranks to average over, None for the model's; or a `CastState`.
        bucket: the gradients. Overwritten with their mean.

    Examples:
        >>> model.register_comm_hook(process_group, bf16_compress_hook)
    """
    return _cast_hook(process_group, bucket, torch.bfloat16, "bf16_compress_hook")


def _compress_wrapper(hook: CommHook, dtype: torch.dtype, name: str) -> CommHook:
    @zero_copy
    @ddp_hook(wrapped=hook)
    def wrapper(hook_state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[no-untyped-def]
        adapted = Bucket.of(bucket)
        if adapted.is_sparse:
            return hook(hook_state, bucket)
        work = adapted.work()  # nothing is kept: buckets of several models may be in flight
        wire = torch.empty(work.source.table.numel, dtype=dtype, device=work.result.device)
        bucket.set_buffer(work.source.flatten(wire))

        def decompress(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            work.target.unflatten(tensor_in(future.value()))
            if wire.device.type == "cuda":  # this stream waits for the others; they must not reuse what it reads
                stream = torch.cuda.current_stream(wire.device)
                wire.record_stream(stream)
                work.target.table.record_stream(stream)
                if not adapted.zero_copy:  # a buffer, which outlives many steps
                    work.result.record_stream(stream)
            return work.result

        return hook(hook_state, bucket).then(decompress)

    wrapper.__name__ = wrapper.__qualname__ = name
    return wrapper


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Wrap ``hook`` so that it gets an fp16 copy of the gradients; its result is cast back to their dtype.

    Finite values saturate at +-65504; inf and NaN pass through.

    Args:
        hook: any communication hook: gradwire's, PyTorch's or your own.

    Examples:
        >>> state = PowerSGDState(process_group=process_group, matrix_approximation_rank=1, start_powerSGD_iter=10)
        >>> model.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook))
    """
    return _compress_wrapper(hook, torch.float16, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Wrap ``hook`` so that it gets a bf16 copy of the gradients; its result is cast back to their dtype.

    Args:
        hook: any communication hook: gradwire's, PyTorch's or your own.

    Examples:
        >>> state = PowerSGDState(process_group=process_group, matrix_approximation_rank=1, start_powerSGD_iter=10)
        >>> model.register_comm_hook(state, bf16_compress_wrapper(powerSGD_hook))
    """
    return _compress_wrapper(hook, torch.bfloat16, "bf16_compress_wrapper_hook")
