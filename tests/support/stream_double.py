"""CUDA streams on a CPU: everything runs at once, and a use of memory that no event orders after the last one raises.

Every stream counts its uses of memory, and knows the uses of each other stream that precede its own (a vector clock).
A wait brings its knowledge up to date. A read must come after the last write of that memory, a write also after all
reads. A dispatch mode records the memory of torch operators, `StreamTransport` that of collectives.
"""

from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.comm import LocalTransport, stream_executor
from gradwire.comm.transport import AllReduce


class Race(Exception):
    """Two streams use the same memory, and nothing orders them."""


class Stream:
    """A stream that knows the uses of other streams that precede its next one."""

    device = None  # the double that it belongs to
    cuda_stream = 0
    names = iter(range(10**9))

    def __init__(self, *_, priority=0, name=None):
        self.name = name or f"stream {next(self.names)}"
        self.priority = priority
        self.known = defaultdict(int)  # uses of each stream that come before its next one

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        self.device.edges.append((event.stream.name, self.name))
        for name, count in event.known.items():
            self.known[name] = max(self.known[name], count)


class Event:
    """A snapshot of a stream's vector clock."""

    def __init__(self, stream=None):
        if stream is not None:
            self.record(stream)

    def record(self, stream):
        self.stream, self.known = stream, dict(stream.known)

    def wait(self, stream):
        stream.wait_event(self)


class Device(TorchDispatchMode):
    """The double of a GPU; within it, ``torch.cuda`` has these streams."""

    def __init__(self):
        super().__init__()
        self.main = Stream(name="main")
        self.current = [self.main]
        self.edges = []  # names of streams: every wait, in order
        self.collectives = []  # of a `StreamTransport`, in order
        self.written, self.read = {}, defaultdict(dict)  # by address of the memory: the last uses
        self.kept = []  # memory is not freed, so that an address has one meaning

    @contextmanager
    def stream(self, stream):
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def set_stream(self, stream):
        self.current[-1] = stream

    def use(self, reads, writes):
        """The current stream reads and writes tensors."""
        stream = self.current[-1]
        stream.known[stream.name] += 1
        for tensor in (*reads, *writes):
            self._check(tensor, self.written)
        for tensor in writes:
            for last in self.read[_address(tensor)].items():
                self._compare(last, tensor)
        for tensor in reads:
            self.read[_address(tensor)][stream.name] = stream.known[stream.name]
        for tensor in writes:
            self.written[_address(tensor)] = (stream.name, stream.known[stream.name])

    def _check(self, tensor, uses):
        if _address(tensor) in uses:
            self._compare(uses[_address(tensor)], tensor)
        elif tensor.untyped_storage().nbytes():
            self.kept.append(tensor)

    def _compare(self, last, tensor):
        stream, (name, count) = self.current[-1], last
        if stream.known[name] < count:
            raise Race(f"{stream.name} uses {tuple(tensor.shape)} {tensor.dtype} and does not wait for {name}")

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        written = [
            value
            for argument, value in zip(function._schema.arguments, arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written += [keywords[a.name] for a in function._schema.arguments if a.is_out and a.name in keywords]
        writes = [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
        if not any(out.alias_info for out in function._schema.returns):  # else a view, or what was written
            writes += [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        reads = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
        is_view = not writes and any(out.alias_info for out in function._schema.returns)
        if not is_view:
            self.use([tensor for tensor in reads if all(tensor is not w for w in writes)], writes)
        return result


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


class StreamTransport(LocalTransport):
    """A transport of one rank whose collectives use their tensors in the current stream."""

    def __init__(self, device):
        super().__init__()
        self._of = device

    def run(self, collective):
        if isinstance(collective, AllReduce):
            reads, writes = [], collective.tensors
        else:
            reads, writes = [collective.source], [collective.target]
        self._of.use(reads, writes)
        self._of.collectives.append(collective)
        with torch.utils._python_dispatch._disable_current_modes():
            super().run(collective)


class Result(stream_executor.Result):
    """A future whose completion is an event of the current stream, for which the stream that waits for it waits.

    As with PyTorch's futures, only if the result has tensors.
    """

    def __init__(self, executor, _):
        super().__init__(executor, [])
        self._event = None

    def set_result(self, result):
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self._event = Stream.device.current[-1].record_event()
        super().set_result(result)

    def wait(self):
        result = super().wait()
        if self._event is not None:
            Stream.device.current[-1].wait_event(self._event)
        return result


@contextmanager
def stream_double():
    """Yields the `Device` that ``torch.cuda`` and `StreamExecutor` use meanwhile."""
    device = Device()
    with ExitStack() as patches:
        for owner, name, stand_in in (
            (Stream, "device", device),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "stream", device.stream),
            (torch.cuda, "set_stream", device.set_stream),
            (torch.cuda, "current_stream", lambda *_: device.current[-1]),
            (torch.cuda, "device", nullcontext),
            (torch.cuda, "Event", Event),
            (torch.cuda, "_exchange_device", lambda _: 0),
            (torch.cuda, "_maybe_exchange_device", lambda _: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (stream_executor, "Result", Result),
        ):
            patches.enter_context(mock.patch.object(owner, name, stand_in))
        with device:
            yield device
