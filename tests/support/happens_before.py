"""A happens-before checker of streams and memory, without a GPU: `checking` yields a `Checker`.

Within it, ``torch.cuda`` has streams that do everything at once. Each has a vector clock: the number of uses of memory
of every stream that precede its next one. Waits, events, futures and waits of the host pass this knowledge on. The
checker sees every use of memory: operators of PyTorch (it is a dispatch mode), launches of Triton's kernels, direct and
recorded ones, with the addresses in the tables that they read, and collectives. Its findings:

======  ================================================================================================================
RACE    two uses of the same memory, one of them a write, that nothing orders
REUSE   memory is freed, and the stream that it was allocated on may get it again: it allocates memory before it waits
        for a use on another stream, which no `Tensor.record_stream` names
STALE   a kernel, a collective or a CUDA graph gets the address of freed memory, as an argument or in a table
STREAM  a recorded launch runs while another stream than its own is current, or a capture ends before all its streams
HOST    the host reads memory before the copy into it is known to be done
======  ================================================================================================================

On the double of a GPU (`install_gpu`), gradwire's hooks launch their compiled kernels, which do nothing: results are
garbage. Without it, operators of PyTorch stand for kernels. Freed memory stays allocated until the end, so that an
address has one meaning.
"""

import bisect
import ctypes
import pickle
import re
import tempfile
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.jit import JITFunction

from gradwire.bench import host_double
from gradwire.comm import LocalTransport, stream_executor
from gradwire.comm.transport import AllReduce
from gradwire.kernels import launch
from tests.support.training import Fault

RACE, REUSE, STALE, STREAM, HOST = "RACE", "REUSE", "STALE", "STREAM", "HOST"
BACKEND = "gradwire_checked"
LOWEST_ADDRESS = 1 << 32  # a smaller number in a table is no address
_use_count = torch._C._storage_Use_Count


# --- streams, events and futures


class Stream:
    """A stream. ``clock`` counts the uses of memory of every stream that come before its next one."""

    checker = None  # the `Checker` of the running `checking`
    _handles = count(1)

    def __init__(self, *_, priority=0, name="a stream", **__):
        self.name, self.priority = name, priority  # the name is for findings
        self.cuda_stream = self.stream_id = next(self._handles)
        self.device_index, self.device_type = 0, 1
        self.clock = Counter()
        self.checker.streams[self.cuda_stream] = self

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.checker.join(event, self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.record_event().synchronize()

    def query(self):
        return self.record_event().query()


class Event:
    """A stream's clock at one time. A query finds it done, which the host then knows."""

    def __init__(self, *_, **__):
        self.stream, self.clock = None, Counter()

    def record(self, stream=None):
        self.stream = stream or Stream.checker.current
        self.clock = self.stream.clock | Stream.checker.host_clock

    def wait(self, stream=None):
        (stream or Stream.checker.current).wait_event(self)

    def synchronize(self):
        Stream.checker.host_waits(self.clock)

    def query(self):
        self.synchronize()
        return True

    def elapsed_time(self, end):
        return 0.0


class StreamFuture(Future):
    """A future as PyTorch's on a GPU: a stream that waits for it waits for the stream that has set its tensors.

    Its callbacks run on a stream of PyTorch's pool, which waits for it, too.
    """

    event = parent = None

    def set_result(self, result):
        if _tensors_in(result):
            self.event = Stream.checker.current.record_event()
        super().set_result(result)

    def done(self):
        if not super().done() and self.parent is not None:
            self.parent.done()
        return super().done()

    def wait(self):
        self.done()
        result = super().wait()
        if self.event is not None:
            Stream.checker.current.wait_event(self.event)
        return result

    def value(self):
        self.done()
        return super().value()

    def then(self, callback):
        child = StreamFuture()
        child.parent = self

        def run(_):
            child.parent = None
            with Stream.checker.on(Stream(name="pool")):
                if self.event is not None:
                    Stream.checker.current.wait_event(self.event)
                try:
                    child.set_result(callback(self))
                except Exception as error:
                    child.set_exception(error)

        self.add_done_callback(run)
        return child


class _Result(StreamFuture, stream_executor.Result):
    """The future of a task."""

    def __init__(self, executor, _):
        super().__init__(executor, [])

    done = stream_executor.Result.done


# --- memory


class Use(NamedTuple):
    """A use of memory: its number on the stream, and what it was."""

    stream: Stream
    number: int
    by: str


class Block:
    """Memory that was allocated at once: a storage.

    Attributes:
        stream: on which it was allocated, and which may get it again.
        origin: what has allocated it.
        is_host: whether it is memory of the host.
        graph: the CUDA graph in whose capture it was allocated, which keeps it.
        recorded: the streams that `Tensor.record_stream` names.
        written, read: the last write, and the reads since, by stream.
        uses: the last use of each stream.
    """

    def __init__(self, storage, stream, origin, graph):
        self.storage, self.stream, self.origin, self.graph = storage, stream, origin, graph
        self.start, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.is_host = self.is_freed = False
        self.recorded, self.written, self.read, self.uses = set(), None, {}, {}

    def __str__(self):
        return f"memory of {self.stream.name} ({self.origin})"

    def addresses(self):
        """Its int64 numbers that may be addresses."""
        numbers = (ctypes.c_int64 * (self.nbytes // 8)).from_address(self.start)
        return [number for number in numbers if number >= LOWEST_ADDRESS]


class Memory:
    """All blocks: the living ones by storage, and all by address."""

    def __init__(self):
        self.living, self._starts, self._sorted = {}, [], []

    def add(self, block):
        self.living[block.storage._cdata] = block
        at = bisect.bisect(self._starts, block.start)
        self._starts.insert(at, block.start)
        self._sorted.insert(at, block)

    def at(self, address):
        """The block with this address, living or freed."""
        at = bisect.bisect(self._starts, address) - 1
        is_inside = at >= 0 and address < self._sorted[at].start + self._sorted[at].nbytes
        return self._sorted[at] if is_inside else None

    def forget(self, block):
        """The address of a block gets another meaning."""
        at = self._sorted.index(block)
        del self._starts[at], self._sorted[at]

    def take_freed(self):
        """The blocks that only this object refers to."""
        freed = [block for key, block in self.living.items() if _use_count(key) == 1]
        for block in freed:
            del self.living[block.storage._cdata]
        return freed


# --- the checker


class Checker(TorchDispatchMode):
    """See the module. While it is entered, it logs the operators of this thread.

    Attributes:
        main: the stream that is current in the beginning.
        current: the current stream.
        findings: kind and text of each finding, and how often it was made.
        edges: the names of the two streams of each wait.
        counts: numbers of launches, replays, collectives and waits of the host.
        leaves_out: called with an event and the stream that is to wait for it, which does not if it returns True.
        fails_at: number of collectives of an executor until one raises; None: none does.
        capture: the CUDA graph that is captured; None: there is none.
    """

    def __init__(self):
        super().__init__()
        Stream.checker = self
        self.streams, self.host_clock, self.memory = {}, Counter(), Memory()
        self._reusable = defaultdict(list)  # by stream: freed blocks, and their uses that nothing has ordered
        self.main = self.current = Stream(name="main")
        self.findings, self.edges, self.counts = Counter(), set(), Counter()
        self.leaves_out = lambda event, stream: False
        self.fails_at = self.capture = None

    @property
    def kinds(self):
        """The kinds of the findings."""
        return {kind for kind, _ in self.findings}

    def report(self, kind, text):
        self.findings[kind, text] += 1

    # Streams.

    def set_stream(self, stream):
        self.current = stream

    @contextmanager
    def on(self, stream):
        """``stream`` is current."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def join(self, event, stream):
        """``stream`` waits for an event."""
        self.poll()
        if event.stream is not None and not self.leaves_out(event, stream):
            self.edges.add((event.stream.name, stream.name))
            stream.clock |= event.clock

    def host_waits(self, clock):
        """The host waits: all that it enqueues from now on comes later."""
        self.poll()
        self.host_clock |= clock

    def host_waits_for_current(self, by):
        """The host waits for the current stream, because it reads a result."""
        self.counts[f"host waits: {by}"] += 1
        self.host_waits(self.current.clock)

    def synchronize(self, *_):
        """The host waits for all streams."""
        for stream in self.streams.values():
            self.host_waits(stream.clock)

    def knows(self, stream, use):
        """Whether what a stream does next comes after ``use``; None: what the host does."""
        known = self.host_clock if stream is None else stream.clock
        return max(known[use.stream], self.host_clock[use.stream]) >= use.number

    # Memory.

    def block_of(self, tensor, origin):
        """The memory of a tensor, which ``origin`` has allocated if it is new; None if it has none."""
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return None
        block = self.memory.living.get(storage._cdata)
        if block is None:
            self._allocates(self.current)
            block = Block(storage, self.current, origin, self.capture)
            self.memory.add(block)
        return block

    def poll(self):
        """Notice what was freed since the last call."""
        for block in self.memory.take_freed():
            self.free(block)

    def free(self, block):
        self.memory.living.pop(block.storage._cdata, None)
        block.is_freed = block.graph is None
        if block.is_host or block.graph is not None:
            return
        # The allocator waits for the streams of `record_stream`, as far as they have got.
        recorded = block.recorded
        uses = [use for use in block.uses.values() if not any(self.knows(each, use) for each in recorded)]
        self._reusable[block.stream].append((block, uses))

    def _allocates(self, stream):
        """``stream`` gets memory, which may be any that was freed."""
        for block, uses in self._reusable.pop(stream, ()):
            for use in uses:
                if not self.knows(stream, use):
                    self.report(REUSE, f"{block} is freed and used again before {use.by} on {use.stream.name}")

    def use(self, reads, writes, by, stream=None):
        """A stream, by default the current one, uses memory; None stands for no memory."""
        stream = stream or self.current
        stream.clock[stream] += 1
        use = Use(stream, stream.clock[stream], by)
        read, written = ({id(each): each for each in blocks if each is not None} for blocks in (reads, writes))
        if self.capture is not None:
            self.capture.note(read.values(), written.values(), stream)
        for block in (read | written).values():
            if block.is_freed:
                self.report(STALE, f"{by} uses {block}, which is freed")
            if block.written is not None:
                self._compare(block.written, use, block)
            block.uses[stream] = use
        for block in written.values():
            for earlier in block.read.values():
                self._compare(earlier, use, block)
            block.read, block.written = {}, use
        for block in read.values():
            block.read[stream] = use

    def _compare(self, earlier, use, block):
        if not self.knows(use.stream, earlier):
            uses = f"{use.by} on {use.stream.name} does not wait for {earlier.by} on {earlier.stream.name}"
            self.report(RACE, f"{uses}, which uses {block}, too")

    # Memory of the host.

    def host_reads(self, block):
        if block is not None and block.written is not None and not self.knows(None, block.written):
            self.report(HOST, f"the host does not wait for {block.written.by} on {block.written.stream.name}")

    def to_host(self, tensor, by):
        """A copy of a tensor in the host's memory, for which the host waits; itself, if it is there."""
        block = self.block_of(tensor, "an argument")
        if block is None or block.is_host:
            self.host_reads(block)
            return tensor
        self.use([block], [], by)
        self.host_waits_for_current(by)
        return self._copied(tensor, by, is_host=True)

    def to_device(self, tensor):
        """A copy of a tensor in the GPU's memory; itself, if it is there."""
        block = self.block_of(tensor, "an argument")
        if block is None or not block.is_host:
            return tensor
        self.host_reads(block)
        copied = self._copied(tensor, "to", is_host=False)
        self.use([], [self.block_of(copied, "to")], "to")
        return copied

    def _copied(self, tensor, by, is_host):
        with _disable_current_modes():
            copied = tensor.clone()
        if (block := self.block_of(copied, by)) is not None:
            block.is_host = is_host
        return copied

    # Operators.

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # such as a DTensor, whose parts come next
        self.poll()
        result = function(*arguments, **keywords)
        schema, name = function._schema, function.overloadpacket.__name__
        changed = [
            value
            for each, value in zip(schema.arguments, arguments, strict=False)
            if each.alias_info is not None and each.alias_info.is_write
        ]
        changed += [keywords[each.name] for each in schema.arguments if each.is_out and each.name in keywords]
        writes, results, inputs = map(_tensors_in, (changed, result, (arguments, keywords)))
        is_alias = any(each.alias_info for each in schema.returns)  # a view, or what was written
        if name == "record_stream" or (is_alias and not writes):
            return result
        if not is_alias and name.removeprefix("new_").startswith("empty"):
            for tensor in results:
                self.block_of(tensor, name)
            return result
        before = [self.block_of(each, "an argument") for each in writes]
        read = [self.block_of(each, "an argument") for each in inputs if all(each is not one for one in writes)]
        after = before if is_alias else [*before, *(self.block_of(each, name) for each in results)]
        is_on_host = any(block is not None and block.is_host for block in before or read)
        for block in filter(None, [*read, *(before if is_on_host else [])]):
            if block.is_host:
                self.host_reads(block)
        if is_on_host and name != "copy_":
            for block in filter(None, after):
                block.is_host = True
            return result
        self.use(read, after, name)
        # `item` or `equal`, or a copy that the host waits for.
        if isinstance(result, bool | int | float | complex) or (
            is_on_host and not _is_asynchronous(arguments, keywords)
        ):
            self.host_waits_for_current(name)
        return result

    # Kernels and collectives.

    def launched(self, compiled, values, stream, is_recorded=False):
        """A Triton kernel was launched with these arguments: tensors, addresses and numbers."""
        self.poll()
        self.counts["launches"] += 1
        name, found = compiled.metadata.name, accesses_of(compiled)
        if is_recorded:
            self.counts["recorded launches"] += 1
            if stream is not self.current:
                self.report(STREAM, f"{name} on {stream.name}, while {self.current.name} is current")
        reads, writes = [], []
        for argument in sorted(found.reads | found.writes):
            value = values[argument]
            is_tensor = isinstance(value, torch.Tensor)
            block = self.block_of(value, argument) if is_tensor else self.memory.at(value)
            if block is None:
                if not is_tensor:
                    self.report(STALE, f"{name} gets an unknown address as {argument}")
                continue
            reads += [block] * (argument in found.reads)
            writes += [block] * (argument in found.writes)
            if argument in found.tables_read | found.tables_written:
                listed = list(filter(None, map(self.memory.at, block.addresses())))
                for each in listed:
                    if each.is_freed:
                        self.report(STALE, f"{argument} of {name} has the address of {each}, which is freed")
                living = [each for each in listed if not each.is_freed]
                reads += living if argument in found.tables_read else []
                writes += living if argument in found.tables_written else []
        self.use(reads, writes, name, stream)

    def collective(self, reads, writes, by):
        """A collective on the current stream."""
        self.poll()
        self.counts["collectives"] += 1
        if self.fails_at is not None and self.current.name == "collectives":
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                raise Fault("a collective")
        self.use(*([self.block_of(each, "an argument") for each in tensors] for tensors in (reads, writes)), by)


def _is_asynchronous(arguments, keywords):
    """Whether the host does not wait for a ``copy_`` with these arguments."""
    return keywords.get("non_blocking", arguments[2] if len(arguments) > 2 else False)


def _tensors_in(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


# --- what a kernel reads and writes


class Accesses(NamedTuple):
    """Names of a kernel's pointers: to memory that it reads and writes, and to tables of addresses of such memory."""

    reads: set
    writes: set
    tables_read: set
    tables_written: set


_POINTER = re.compile(r'%(\w+): !tt\.ptr<\w+>[^%]*?loc\("(\w+)"')
_LINE = re.compile(r'\s*(?:(%[\w#:, %]+?) = )?"?([a-z_]+\.[a-z_.]+)"?(.*)')
_VALUE = re.compile(r"%(\w+)")
_CARRIED = re.compile(r"%(\w+) = %(\w+)")  # into a loop


def accesses(ttir):
    """The `Accesses` of a kernel, from its intermediate code: each load and store is traced to the kernel's pointers.

    Loaded values are traced, too: they may be addresses.
    """
    origins = {}  # by value: the pointers that it stems from, and whether through a load
    found = Accesses(set(), set(), set(), set())

    def note(pointers, direct, tables):
        bases = {pointer for pointer, is_loaded in pointers if not is_loaded}  # what is loaded is then an offset
        direct |= bases
        tables |= {pointer for pointer, _ in pointers} if not bases else set()

    for line in ttir.splitlines():
        if "tt.func" in line:
            origins |= {value: {(name, False)} for value, name in _POINTER.findall(line)}
        elif (match := _LINE.match(line)) is not None:
            results, operation, rest = match.groups()
            operands = [origins.get(value, set()) for value in _VALUE.findall(rest)]
            stems_from = set().union(*(operands[:1] if operation == "tt.addptr" else operands))
            if operation == "tt.load" or operation.startswith("tt.atomic"):
                note(operands[0], found.reads, found.tables_read)
                stems_from = {(pointer, True) for pointer, _ in operands[0]}
            if operation == "tt.store" or operation.startswith("tt.atomic"):
                note(operands[0], found.writes, found.tables_written)
            origins |= {value: origins.get(first, set()) for value, first in _CARRIED.findall(rest)}
            origins |= dict.fromkeys(_VALUE.findall(results or ""), stems_from)
    return found


@cache
def accesses_of(compiled):
    """The `Accesses` of a compiled kernel."""
    return accesses(compiled.asm["ttir"])


# --- collectives


class _Work(dist.Work):
    """A collective that NCCL runs on a stream of its own."""

    def __init__(self, tensors):
        super().__init__()
        self._future = StreamFuture()
        self._future.set_result(tensors)

    def wait(self, timeout=None):
        self._future.wait()
        return True

    def get_future(self):
        return self._future

    def is_completed(self):
        return True


class CheckedGroup(host_double.Collectives):
    """Collectives of any number of ranks. All ranks seem to have what this one has, but a broadcast goes to the others.

    A collective runs on the current stream, an asynchronous one on a stream of its own, as over NCCL.
    """

    def __init__(self, store, rank, size, timeout):
        super().__init__(store, rank, size, timeout)
        self._store, self._n_broadcasts = store, 0

    def getBackendName(self):
        return BACKEND

    def _run(self, reads, writes, by, options):
        checker = Stream.checker
        if not getattr(options, "asyncOp", True):
            checker.collective(reads, writes, by)
            return None
        stream = Stream(name="NCCL")
        stream.wait_stream(checker.current)
        with checker.on(stream):
            checker.collective(reads, writes, by)
            for tensor in (*reads, *writes):  # PyTorch keeps them until the collective is done
                tensor.record_stream(stream)
            return _Work(writes)

    def allreduce(self, tensors, options=None):
        return self._run([], tensors, "all_reduce", options)

    def broadcast(self, tensors, options=None):
        if self.size() > 1:
            self._n_broadcasts += 1
            key, is_root = f"broadcast/{self._n_broadcasts}", options.rootRank == self.rank()
            with _disable_current_modes():
                if is_root:
                    self._store.set(key, pickle.dumps(tensors))
                else:
                    torch._foreach_copy_(tensors, pickle.loads(self._store.get(key)))
        return self._run([], tensors, "broadcast", options)

    def allgather(self, gathered, own, options=None):
        for each in gathered[0]:
            each.copy_(own[0])
        return self._run(own, gathered[0], "all_gather", options)

    def _allgather_base(self, gathered, own, options=None):
        with _disable_current_modes():
            gathered.view(self.size(), -1).copy_(own.clone().view(1, -1))  # may be a part of it
        return self._run([own], [gathered], "all_gather", options)

    def _reduce_scatter_base(self, output, source, options=None):
        return self._run([source], [output], "reduce_scatter", options)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names from torch 2.13 on

    def alltoall_base(self, received, sent, *splits_and_options):
        with _disable_current_modes():
            received.copy_(sent)
        return self._run([sent], [received], "all_to_all", splits_and_options[-1])


class CheckedTransport(LocalTransport):
    """A transport of one rank whose collectives use their tensors in the current stream; ``issued`` has them all."""

    def __init__(self):
        super().__init__()
        self.issued = []

    def run(self, collective):
        if isinstance(collective, AllReduce):
            reads, writes = [], collective.tensors
        else:
            reads, writes = [collective.source], [collective.target]
        Stream.checker.collective(reads, writes, type(collective).__name__)
        self.issued.append(collective)
        with _disable_current_modes():
            super().run(collective)


# --- CUDA graphs


class Graph:
    """A CUDA graph: a replay repeats the uses of memory in the capture, as one use on the current stream.

    Memory that was allocated in the capture lives as long as the graph.
    """

    def __init__(self, *_, **__):
        self._reads, self._writes, self.streams = [], [], set()

    def note(self, reads, writes, stream):
        self._reads += reads
        self._writes += writes
        self.streams.add(stream)

    def replay(self):
        Stream.checker.counts["replays of a graph"] += 1
        Stream.checker.use(self._reads, self._writes, "a graph")

    def reset(self):
        pass


@contextmanager
def _capturing(checker, graph, *_, stream=None, **__):
    """Stands in for ``torch.cuda.graph``. A capture runs nothing, so nobody waits for what it uses."""
    checker.synchronize()
    stream = stream or Stream(name="capture")
    with checker.on(stream):
        checker.capture = graph
        try:
            yield
        finally:
            checker.capture = None
    for each in graph.streams:
        if not checker.knows(stream, Use(each, each.clock[each], "")):
            checker.report(STREAM, f"{each.name} is not joined at the end of the capture")
    checker.synchronize()


# --- contexts


@cache
def install_gpu():
    """Give this process, a rank of a test, the double of a GPU for good, and the backend of `CheckedGroup`."""
    host_double.install(Path(tempfile.mkdtemp(prefix="gradwire-")))
    dist.Backend.register_backend(BACKEND, CheckedGroup, devices=["cpu", "cuda"])


@contextmanager
def checking():
    """Yields the `Checker` of what happens meanwhile."""
    checker = Checker()
    with ExitStack() as patches:
        for stand_ins in (_cuda, _executors, _launches, _tensors):
            for owner, name, stand_in in stand_ins(checker):
                is_new = owner is torch._C  # builds for CPUs lack functions
                patches.enter_context(mock.patch.object(owner, name, stand_in, create=is_new))
        with checker:
            yield checker
            checker.poll()


# What is replaced meanwhile: owner, name and stand-in.


def _cuda(checker):
    cuda = torch.cuda
    return [
        (cuda, "Stream", Stream),
        (cuda, "Event", Event),
        (cuda, "CUDAGraph", Graph),
        (cuda, "graph", partial(_capturing, checker)),
        (cuda, "stream", checker.on),
        (cuda, "set_stream", checker.set_stream),
        (cuda, "current_stream", lambda device=None: checker.current),
        (cuda, "synchronize", checker.synchronize),
        (cuda, "device", nullcontext),
        (cuda, "_exchange_device", lambda _: 0),
        (cuda, "_maybe_exchange_device", lambda _: 0),
        (cuda, "is_current_stream_capturing", lambda: checker.capture is not None),
        (torch._C, "_cuda_getCurrentRawStream", lambda index: checker.current.cuda_stream),
        (torch._C, "_storage_Use_Count", lambda key: _use_count(key) - (key in checker.memory.living)),
    ]


def _executors(checker):
    kind = stream_executor.StreamExecutor
    initialize, replay = kind.__init__, kind.replay

    def named(executor, *arguments):
        initialize(executor, *arguments)
        executor._kernels.name, executor._collectives.name = "kernels", "collectives"

    def counted(executor, *arguments, **options):
        checker.counts["replays"] += 1
        return replay(executor, *arguments, **options)

    return [(kind, "__init__", named), (kind, "replay", counted), (stream_executor, "Result", _Result)]


def _launches(checker):
    run, bound = JITFunction.run, launch.bound

    def run_and_check(function, *arguments, warmup, **options):
        compiled = run(function, *arguments, warmup=warmup, **options)
        if not warmup:
            values = dict(zip(function.arg_names, arguments, strict=False)) | options
            checker.launched(compiled, values, checker.current)
        return compiled

    def bind_and_check(compiled, stream, grid, values):
        call = bound(compiled, stream, grid, values)
        by_name = dict(zip(compiled.src.fn.arg_names, values, strict=True))

        def checked():
            checker.launched(compiled, by_name, checker.streams[stream], is_recorded=True)
            return call()

        return checked

    return [(JITFunction, "run", run_and_check), (launch, "bound", bind_and_check)]


def _tensors(checker):
    kind, storage = torch.Tensor, torch.UntypedStorage
    empty, from_buffer, load = torch.empty, torch.frombuffer, torch.load
    to, to_list, resize = kind.to, kind.tolist, storage.resize_

    def of_host(tensor):
        if (block := checker.block_of(tensor, "an argument")) is not None:
            block.is_host = True
        return tensor

    def empty_of_host(*sizes, **options):
        tensor, device = empty(*sizes, **options), options.get("device")
        is_host = options.get("pin_memory") or (device == "cpu" and not isinstance(device, host_double.Device))
        return of_host(tensor) if is_host else tensor

    def loaded(*file, **options):
        with _disable_current_modes():
            content = load(*file, **options)
        return tree_map_only(torch.Tensor, of_host, content)

    def device(tensor):
        place = torch._C.TensorBase.device.__get__(tensor)
        return host_double.DEVICE if place.type == "cpu" and tensor.is_cuda else place

    def to_place(tensor, *arguments, **options):
        places = [each for each in (*arguments, *options.values()) if isinstance(each, str | torch.device)]
        if places and isinstance(places[0], host_double.Device):
            tensor = checker.to_device(tensor)
        elif places and torch.device(places[0]).type == "cpu":
            tensor = checker.to_host(tensor, "to")
        return to(tensor, *arguments, **options)

    def listed(tensor):
        block = checker.block_of(tensor, "an argument")
        if block is not None and block.is_host:
            checker.host_reads(block)
        else:
            checker.host_waits_for_current("tolist")
        return to_list(tensor)

    def record_stream(tensor, stream):
        if (block := checker.block_of(tensor, "an argument")) is not None:
            block.recorded.add(stream)

    def resized(memory, nbytes):
        if (block := checker.memory.living.get(memory._cdata)) is not None:
            checker.free(block)
            checker.memory.forget(block)
        return resize(memory, nbytes)

    return [
        (torch, "empty", empty_of_host),
        (torch, "frombuffer", lambda *content, **options: of_host(from_buffer(*content, **options))),
        (torch, "load", loaded),
        (kind, "to", to_place),
        (kind, "device", property(device)),
        (kind, "cpu", lambda tensor: checker.to_host(tensor, "cpu")),
        (kind, "tolist", listed),
        (kind, "record_stream", record_stream),
        (storage, "resize_", resized),
    ]
