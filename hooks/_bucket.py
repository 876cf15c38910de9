"""A bucket of either DDP, `reduce_bucket`, which averages it, and the names of its parameters.

PyTorch's DDP passes one flat buffer per bucket; gradwire's passes a list of gradients. A hook marked with `zero_copy`
reads and writes these gradients directly if the reducer calls it; if a wrapper calls it, it gets the flat buffer and
returns it, as PyTorch's hooks do. Either way, `Gradients` has one tensor per parameter.

Parameter names, unlike bucket indices, survive rebuilds and restarts. PyTorch's buckets have none: `ParameterNames`.
"""

import functools
import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.comm import Algorithm, Transport, Workspace, connections_of
from gradwire.compress import Gradients, Step, sparse_all_reduce
from gradwire.hooks.telemetry import Telemetry
from gradwire.kernels import SegmentTable, as_real, gradient_layout, is_capturing, layout_in_dtype

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:  # PyTorch compares the annotation of a hook with this class
    from torch.distributed import GradBucket

CommHook = Callable[[Any, GradBucket], Future[torch.Tensor]]
Tables = dict[tuple[object, ...], SegmentTable]  # by bucket index, number of elements, strides and dtype
Hook = TypeVar("Hook", bound=Callable[..., object])

logger = logging.getLogger("gradwire.hooks")

NUMBERED = "parameter."
# Name components that torch.compile, activation checkpointing and FSDP add.
_WRAPPED = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))

# Not an attribute of the hook: functools.wraps would copy it to a user's wrapper, which expects flat buffers.
_zero_copy_hooks: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
_gradwire_hooks: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()

# Tables of flat buckets, kept from step to step.
_tables_of: weakref.WeakKeyDictionary[Transport, Tables] = weakref.WeakKeyDictionary()


def zero_copy(hook: Hook) -> Hook:
    """Mark a hook as zero-copy: it gets its gradients from `bucket_work`, so they need not be in a flat buffer."""
    _zero_copy_hooks.add(hook)
    return hook


def is_zero_copy(hook: Callable[..., object]) -> bool:
    """Whether ``hook`` is marked by `zero_copy`."""
    return any(marked is hook for marked in _zero_copy_hooks)  # a hook need not be hashable


class GradwireBucket(Protocol):
    """The interface of gradwire's buckets in addition to PyTorch's; see `gradwire.reducer.bucket`."""

    process_group: dist.ProcessGroup | None
    # With a user's hook: called with the settings and the process group of each of gradwire's hooks that it calls.
    note_use: Callable[[Any, dist.ProcessGroup], None] | None
    model_number: int  # of the model's exchange on the process group, equal on all ranks
    n_passes: int  # number of synchronized forwards of the model; 0 if it must not be compared
    model_parameters: Sequence[torch.Tensor]
    device: torch.device
    zero_copy: bool  # whether `source` and `target` may be used; else the bucket is a flat buffer

    def source(self) -> Gradients:
        """The gradients."""

    def target(self) -> Gradients:
        """The tensors that receive the mean of the gradients."""

    def empty_buffer(self) -> torch.Tensor:
        """A flat tensor for the mean of the gradients, as the value of the hook's future instead of `target`."""

    def parameter_names(self) -> list[str]:
        """The names of the parameters, in order."""


class BucketWork(NamedTuple):
    """The tensors of a bucket that an algorithm reads and writes."""

    source: Gradients  # the gradients
    target: Gradients  # the tensors that receive the mean; may be ``source``
    result: torch.Tensor  # the value of the hook's future: the flat buffer, or the first tensor of ``target``


def is_sparse(bucket: GradBucket) -> bool:
    """Whether the bucket is one sparse gradient, which `reduce_bucket` averages uncompressed."""
    return not hasattr(bucket, "zero_copy") and bucket.buffer().is_sparse


def bucket_device(bucket: GradBucket) -> torch.device:
    """The device of the bucket's gradients."""
    return cast("GradwireBucket", bucket).device if hasattr(bucket, "zero_copy") else bucket.buffer().device


def bucket_dtype(bucket: GradBucket) -> torch.dtype:
    """The real dtype of the bucket's gradients, or of the buffer that a wrapper has set instead."""
    if getattr(bucket, "zero_copy", False):
        return bucket.parameters()[0].dtype.to_real()
    return bucket.buffer().dtype


def real_layouts(bucket: GradBucket) -> list[torch.Tensor]:
    """Real tensors with the shapes, strides, dtype and device of the bucket's gradients."""
    dtype = bucket_dtype(bucket)
    return [layout_in_dtype(as_real(gradient_layout(parameter)), dtype) for parameter in bucket.parameters()]


def bucket_work(bucket: GradBucket, tables: Tables, layout: SegmentTable | None = None) -> BucketWork:
    """The tensors of a dense bucket: the gradients if it is zero-copy, else the flat buffer.

    ``tables`` keeps layouts of flat buckets; ``layout`` is that of the gradients in one, if it must be taken apart.
    """
    if getattr(bucket, "zero_copy", False):
        target = cast("GradwireBucket", bucket).target()
        return BucketWork(cast("GradwireBucket", bucket).source(), target, target.tensors[0])
    buffer = bucket.buffer()
    key = (bucket.index(), buffer.numel(), buffer.stride(), buffer.dtype)
    if key not in tables:
        tables[key] = SegmentTable([buffer])
    flat = Gradients([buffer], tables[key], layout)
    return BucketWork(flat, flat, buffer)


def reduce_bucket(
    process_group: dist.ProcessGroup | None,
    bucket: GradBucket,
    algorithm: Callable[[Step], Algorithm[None]],
    name: str,
    *,
    memory: Any = None,
    iteration: int = 0,
    names: tuple[str, ...] = (),
    divisor: int | None = None,
    telemetry: Telemetry | None = None,
) -> Future[torch.Tensor]:
    """Run ``algorithm(step)`` on a bucket, in bucket order; the future has its result.

    Args:
        process_group: the ranks to average over; None for the model's.
        bucket: a bucket of either DDP. A sparse gradient is averaged without the algorithm, by ``divisor`` or the world
            size.
        algorithm: an ``async`` function that awaits its collectives.
        name: name of the hook, for profiler ranges.
        memory, iteration, names: of the `Step`. On PyTorch's DDP, `Step.gradients` needs ``memory.layout``.
        telemetry: that of the hook's state.
    """
    device, index, is_last = bucket_device(bucket), bucket.index(), bucket.is_last()
    executor = connections_of(process_group).executor(device)
    transport, workspaces = executor.transport, executor.workspaces
    layout = getattr(memory, "layout", None)
    work = None if is_sparse(bucket) else bucket_work(bucket, _tables_of.setdefault(transport, {}), layout)
    result = bucket.buffer() if work is None else work.result
    is_on_pytorchs_ddp = not hasattr(bucket, "model_parameters")
    n_passes = getattr(bucket, "n_passes", 0) if device.type == "cpu" else 0  # on a GPU, the host would have to wait

    # Not in the task: `sample` calls the user's report, which must run in the training thread.
    sample = telemetry.sample(index) if telemetry is not None and not is_capturing(device) else None

    async def task(workspace: Workspace) -> torch.Tensor:
        if index == 0:
            for each in workspaces:
                each.start_step()
        transport.n_passes = n_passes
        steps: Algorithm[Any]
        if work is None:
            steps = sparse_all_reduce(result, transport, divisor or transport.world_size)
        else:
            steps = algorithm(Step(work.source, work.target, memory, iteration, transport, workspace, names))
        if sample is not None:
            steps = sample.measured(steps, is_last, device, work and work[:2], transport)
        try:
            await steps
        except Exception:
            if is_on_pytorchs_ddp:  # which raises "Unable to cast ... to Tensor" without a traceback
                logger.exception("%s failed in bucket %s:", name, index)
            raise
        return result

    future = executor.submit(task, f"gradwire::{name}, bucket {index}")
    if is_last:
        executor.finish()
    return cast("Future[torch.Tensor]", future)


def all_reduce_on_cpu(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Start the all-reduce of the mean of a dense bucket on a CPU; the future holds the flat mean.

    Nothing is computed after it, so a task in the executor's thread would only compete for the interpreter lock.
    """
    device, connections = bucket_device(bucket), connections_of(process_group)
    transport = connections.transport("backward", device)
    if bucket.index() == 0:
        connections.start_step()
    source, target, result = bucket_work(bucket, _tables_of.setdefault(transport, {}))
    if getattr(bucket, "zero_copy", False) and target.flat is None:
        result = cast("GradwireBucket", bucket).empty_buffer()
    wire = torch.view_as_real(result).view(-1) if result.is_complex() else result
    source.flatten(wire, scale=1 / transport.world_size)

    def finished(future: Future[object]) -> torch.Tensor:
        future.value()  # raises gloo's error
        return result

    return transport.start_all_reduce(wire).then(finished)


def described(value: object) -> str:
    """A value for an error message: short values in full, others by type."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"an object of type {type(value).__qualname__}"


def check_process_group(value: object, argument: str = "process_group") -> None:
    """Raise TypeError unless ``value`` is a process group or None."""
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise TypeError(
            f"{argument} is {described(value)}; expected a torch.distributed.ProcessGroup, as dist.new_group() returns "
            "it, or None for the model's process group."
        )


def _check_state(hook_name: str, state: object, kinds: tuple[type, ...]) -> None:
    if dist.ProcessGroup in kinds:
        check_process_group(state, f"The state of {hook_name}")
        return
    kind = kinds[0]
    # PyTorch has some of gradwire's names, too.
    what = f"{'a gradwire' if kind.__module__.startswith('gradwire.') else 'an instance of'} {kind.__name__}"
    raise TypeError(
        f"The state of {hook_name} is {described(state)}; expected {what}: "
        f"model.register_comm_hook({kind.__name__}(process_group), {hook_name})."
    )


def ddp_hook(*kinds: type) -> Callable[[Hook], Hook]:
    """Decorate a hook: raise TypeError for a state of another class than ``kinds``, or without a bucket.

    Without ``kinds``, any state is accepted. With ``ProcessGroup`` among them, None is accepted, too.
    """

    def decorate(hook: Hook) -> Hook:
        names = list(inspect.signature(hook).parameters)

        @functools.wraps(hook)
        def checked(*arguments: Any, **named: Any) -> Any:
            state = arguments[0] if arguments else named.get(names[0])
            if kinds and not isinstance(state, kinds):
                _check_state(checked.__name__, state, kinds)
            bucket = arguments[1] if len(arguments) > 1 else named.get("bucket")
            if len(arguments) > len(names) or not (hasattr(bucket, "buffer") and hasattr(bucket, "parameters")):
                raise TypeError(
                    f"{checked.__name__} was called with {described(bucket)} in place of a bucket of gradients. It is "
                    "a communication hook for DistributedDataParallel, of PyTorch or of gradwire; neither "
                    "FullyShardedDataParallel nor compiled autograd's Python reducer can call it."
                )
            return hook(*arguments, **named)

        _gradwire_hooks.add(checked)
        return cast("Hook", checked)

    return decorate


def is_gradwire_hook(hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is one of gradwire's, a 16-bit wrapper included."""
    return any(each is hook for each in _gradwire_hooks)  # a hook need not be hashable


def is_number(name: str) -> bool:
    """Whether ``name`` numbers a parameter in the order of first appearance (``parameter.0``)."""
    return name.startswith(NUMBERED) and name.removeprefix(NUMBERED).isdecimal()


@functools.cache
def plain_name(name: str) -> str:
    """A parameter's name without the components that module wrappers add, such as ``_orig_mod``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside the wrappers DDP, DataParallel, torch.compile, FSDP and activation checkpointing."""
    while True:
        children = module._modules
        if isinstance(module, (TorchDDP, torch.nn.DataParallel)):
            module = module.module
        elif len(children) == 1 and (inner := next(iter(children))) in _WRAPPED:
            module = module.get_submodule(inner)
        else:
            return module


def parameter_names(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The plain name of every parameter of an unwrapped module; raises ValueError if two are the same."""
    names: dict[torch.Tensor, str] = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
    if len(set(names.values())) < len(names):
        raise ValueError(
            f"Two parameters of this {type(module).__name__} have the same name without the components "
            f"{sorted(_WRAPPED)}, which wrappers of modules add. Give one of its submodules another name."
        )
    return names


def compressible_parameters(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """`parameter_names` of the trainable parameters whose gradients are dense, as DDP expects them."""
    embeddings = (part for part in module.modules() if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag))
    sparse = {id(part.weight) for part in embeddings if part.sparse}
    names = parameter_names(module)
    return {each: name for each, name in names.items() if each.requires_grad and id(each) not in sparse}


def registered_module(state: object, parameters: Sequence[torch.Tensor] = ()) -> torch.nn.Module | None:
    """The model whose DDP calls a hook with ``state`` and these parameters; None if there is not exactly one."""
    modules = [unwrapped(ddp.module) for ddp in registered_wrappers(state, parameters)]
    return modules[0] if len(set(map(id, modules))) == 1 else None


class ParameterNames:
    """The names of parameters, from the model passed to `bind` or found by `registered_module`.

    PyTorch's buckets have no names. If no model is found, parameters are numbered in the order of first appearance,
    ``parameter.0``, ``parameter.1``, ..., which in PyTorch's first backward depends only on the model and is equal on
    all ranks. Numbers suffice to train, but not for options by name or checkpoints.
    """

    def __init__(self, state: object) -> None:
        self._state = weakref.ref(state)
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unnamed = 0
        self._module: weakref.ref[torch.nn.Module] | None = None
        self.layouts: dict[str, torch.Tensor] = {}  # of `bind_layouts`
        self.is_closed = False  # whether every parameter has appeared: no further one is numbered

    @property
    def is_complete(self) -> bool:
        """Whether all names are known: from a module, or because every parameter has appeared."""
        return self.module is not None or self.is_closed

    def known(self) -> dict[str, torch.Tensor]:
        """The parameters with a name so far, by name."""
        return {name: parameter for parameter, name in self._names.items()}

    def note(self, names: Sequence[str], bucket: GradBucket) -> None:
        """Store the names that `in_bucket` returned for this bucket, unless all are known."""
        if not self.is_closed and (self._module is None or self._module() is None):
            self._names.update(zip(bucket.parameters(), names, strict=True))

    def bind(self, module: torch.nn.Module) -> None:
        """Take the names from ``module.named_parameters()``, as `plain_name` has them."""
        module = unwrapped(module)
        bound = self.module
        if bound is not None and bound is not module:
            raise ValueError(
                f"This state belongs to another model, a {type(bound).__name__}; a state serves one model only. "
                f"Create a new state for this {type(module).__name__}."
            )
        if self.are_numbers:
            raise ValueError(
                "This state has trained without parameter names, and identifies parameters by their order. "
                "Call state.bind(model) before the first step, on every rank."
            )
        self._names.update(parameter_names(module))
        self._module = weakref.ref(module)

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError if the state belongs to a model with other parameters."""
        known = self.known()
        if known and known.keys() != set(names):
            different = min(known.keys() ^ set(names))
            raise ValueError(
                f"This state belongs to another model: only one of the two has a parameter {different!r}. A state "
                "serves one model only. Create a new state for this model."
            )

    def bind_layouts(self, layouts: Mapping[str, torch.Tensor]) -> None:
        """Take the names of all parameters; see `HookState.bind_layouts`."""
        self.layouts = dict(layouts)
        self._names.update((layout, name) for name, layout in layouts.items())
        self.is_closed = True

    def compressible(self) -> dict[torch.Tensor, str]:
        """The trainable parameters with dense gradients; empty if the model is unknown."""
        module = self.module
        if module is None:
            return {layout: name for name, layout in self.layouts.items() if layout.numel() > 0}
        return compressible_parameters(module)

    @property
    def module(self) -> torch.nn.Module | None:
        """The model that the names are from; None if there is none or it no longer exists."""
        return self._module() if self._module is not None else None

    @property
    def are_numbers(self) -> bool:
        """Whether parameters are numbered in the order of first appearance."""
        return self._unnamed > 0

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the module, if there is one."""
        module = self.module
        return list(module.parameters()) if module is not None else list(self.layouts.values())

    def search(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        """Bind the model that `registered_module` finds, unless there is one or parameters are numbered."""
        if self.module is None and not self.are_numbers:
            module = registered_module(self._state(), parameters)
            if module is not None:
                self.bind(module)

    def require(self, needed_by: str) -> None:
        """Raise RuntimeError, with ``needed_by`` as its subject, if parameters are numbered."""
        if self.are_numbers:
            raise self._unknown(needed_by)

    def in_bucket(self, bucket: GradBucket, needed_by: Callable[[], str | None]) -> tuple[str, ...]:
        """The names of the bucket's parameters; ``needed_by`` returns the subject of the error if numbers do not
        suffice.
        """
        parameters = bucket.parameters()
        names: list[str | None] = list(map(self._names.get, parameters))
        if None in names:
            self.search(parameters)
            names = list(map(self._names.get, parameters))
        unnamed = [parameter for parameter, name in zip(parameters, names, strict=True) if name is None]
        if unnamed and (self.is_closed or self.module is not None):
            raise ValueError(
                f"A parameter of shape {tuple(unnamed[0].shape)} belongs to another model than earlier ones; a "
                "state serves one model only. Create a new state for each model. If a model's parameters change, call "
                "state.bind(module) with that model."
            )
        if (unnamed or self._unnamed > 0) and (needing := needed_by()) is not None:
            raise self._unknown(needing)
        for parameter in unnamed:
            self._names[parameter] = f"{NUMBERED}{self._unnamed}"
            self._unnamed += 1
            names[names.index(None)] = self._names[parameter]
        return tuple(cast("list[str]", names))

    def _unknown(self, needed_by: str) -> RuntimeError:
        return RuntimeError(
            f"{needed_by} needs the names of parameters. PyTorch's DistributedDataParallel does not pass them to "
            "hooks, and no model, or more than one, was found for this state. Call state.bind(model) before the first "
            "step, on every rank."
        )


def live_wrappers() -> list[TorchDDP]:
    """All live wrappers, PyTorch's, gradwire's and other subclasses, unless ``gc.freeze()`` hid them.

    One pass over all objects of Python's garbage collector: 50 ms for a million.
    """
    kinds: list[type] = [TorchDDP]
    for kind in kinds:  # the list grows
        kinds += kind.__subclasses__()
    objects = gc.get_referrers(*kinds)  # an instance refers to its class
    return [ddp for ddp in objects if TorchDDP in type(ddp).__mro__ and "module" in vars(ddp).get("_modules", {})]


def registered_wrappers(state: object, parameters: Sequence[torch.Tensor] = ()) -> list[TorchDDP]:
    """The live wrappers that hold ``state`` with a hook and have these parameters.

    If none holds the state, because the user's own hook passes it on: all with a hook and these parameters.
    """
    wanted = set(map(id, parameters))
    hooked = [ddp for ddp in live_wrappers() if getattr(ddp, "_comm_hooks", None)]
    hooked = [ddp for ddp in hooked if wanted <= set(map(id, ddp.module.parameters()))]
    holders = [ddp for ddp in hooked if any(held is state for _, held in ddp._comm_hooks)]
    return holders or (hooked if wanted else [])
