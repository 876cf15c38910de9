"""`quantized_reduction`, which averages a bucket in a wire format without a state, and the size of nodes."""

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.algorithms import NodeBucket, Quantization, QuantizedBucket, Step, repeatable
from gradwire.algorithms._validation import check_whole_number
from gradwire.comm import Algorithm, Transport
from gradwire.hooks._bucket import Bucket, GradBucket
from gradwire.hooks._plans import replayed
from gradwire.hooks._reduction import reduce_bucket
from gradwire.hooks._settings import HookSettings
from gradwire.kernels import WIRE_FORMATS


def check_local_size(value: object) -> None:
    """Raise ValueError unless ``value`` is "auto" or a number of ranks."""
    if value != "auto":
        check_whole_number("local_size", value, "'auto', or the number of ranks on each node, at least 1", 1)


def ranks_on_node(local_size: int | str, transport: Transport) -> int:
    """The number of consecutive ranks on each node, which divides the world size; that which they found for "auto"."""
    size = transport.local_size if isinstance(local_size, str) else local_size
    if transport.world_size % size != 0:
        raise ValueError(
            f"local_size is {size}, but {transport.world_size} ranks exchange gradients; expected a divisor of that "
            "number: every node has equally many ranks. Pass 'auto', or 1 to exchange among all ranks directly."
        )
    return size


def bucket_kind(options: Quantization) -> type[QuantizedBucket] | type[NodeBucket]:
    """The class of buckets that are averaged among all ranks directly, or on nodes of several ranks."""
    return NodeBucket if options.local_size > 1 else QuantizedBucket


@repeatable
def quantized(step: Step) -> Algorithm[None]:
    """The algorithm of a bucket of `bucket_kind`."""
    return step.memory.all_reduce(step)  # type: ignore[no-any-return]


def quantized_reduction(
    process_group: dist.ProcessGroup | None,
    bucket: GradBucket,
    wire: str,
    block_size: int,
    local_size: int | str,
    settings: HookSettings,
) -> Future[Tensor]:
    """Average a bucket in a format of `WIRE_FORMATS`, with sums in fp32 and without memory; see `QuantizationState`."""
    adapted = Bucket.of(bucket)
    connections = settings.handshake.agree(settings, adapted, process_group)
    if (future := replayed(settings, adapted, connections, quantized)) is not None:
        return future
    if adapted.is_sparse:
        return reduce_bucket(connections, adapted, quantized, settings)
    transport = connections.executor(adapted.device).transport
    buckets, n_local = adapted.kept_layouts(transport), ranks_on_node(local_size, transport)
    key = (wire, block_size, n_local, adapted.dtype, *adapted.layouts)
    if key not in buckets:
        formats = [WIRE_FORMATS[wire]] * len(adapted.layouts)
        options = Quantization(block_size=block_size, error_dtype=None, local_size=n_local)
        buckets[key] = bucket_kind(options)(adapted.real_layouts(), formats, transport, options)
    return reduce_bucket(connections, adapted, quantized, settings, memory=buckets[key])
