"""Parameters that are unused in a backward, replaced after wrapping, or shared by several wrappers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules import module as modules
from torch.profiler import record_function

from gradwire.comm import GroupTransport
from gradwire.comm.store_collectives import out_of_step
from gradwire.hooks._names import live_wrappers
from gradwire.kernels import upload
from gradwire.reducer import errors, torch_internals

FORWARDS_BETWEEN_CHECKS = 64  # also after changes that bypass `nn.Module.register_parameter`

_requires_grad = attrgetter("requires_grad")
_registrations = count()
_latest = -1  # number of the latest registration of a parameter or a submodule, in any module of this process
TorchDDP = nn.parallel.DistributedDataParallel

# For each wrapper, the wrappers around it that have been checked.
_checked: WeakKeyDictionary[TorchDDP, WeakSet[TorchDDP]] = WeakKeyDictionary()
# gradwire's wrappers that have begun a forward.
_have_run_forward: WeakSet[Any] = WeakSet()


def find_unused(outputs: Sequence[Tensor], accumulators: Sequence[Node]) -> list[int]:
    """The indices of the gradient accumulators that a backward from ``outputs`` cannot reach."""
    with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):  # PyTorch's name in a profile
        stack = [torch_internals.gradient_node(output) for output in outputs if output.requires_grad]
        seen = set(stack)  # keeps the nodes alive: a new node may get the address of a freed one
        while stack:
            for node, _ in stack.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    stack.append(node)
        unused = [i for i, accumulator in enumerate(accumulators) if accumulator not in seen]
    if not unused:
        _warn_once_that_all_are_used()
    return unused


@cache
def _warn_once_that_all_are_used() -> None:
    warnings.warn(errors.NOTHING_UNUSED, stacklevel=3)


class UsedParameters:
    """The parameters that have a gradient since the last reduction, on this rank and on any rank."""

    def __init__(self, n_parameters: int, device: torch.device) -> None:
        self.local = bytearray(n_parameters)  # 1 for each parameter that has a gradient on this rank
        # Number of ranks that have a gradient for each parameter, as last exchanged.
        self.counts = torch.zeros(n_parameters, dtype=torch.int32, device=device)
        self._passes = self.counts[:0]  # `Exchange.n_passes` of each rank, as last exchanged
        self._device = device
        self._wait: Callable[[], None] | None = None  # waits for the exchange in flight
        self._counts_on_host: list[int] | None = None  # `counts` after the exchange

    def exchange(self, transport: GroupTransport, n_passes: int = 0) -> None:
        """Start to sum `local` over the ranks, and to share ``n_passes``. A collective call; `used_anywhere` waits for
        it.

        ``n_passes``: `Exchange.n_passes`; 0 on a rank that has joined.
        """
        passes = [n_passes if rank == transport.rank else 0 for rank in range(transport.world_size)]
        message = upload([*self.local, *passes], self._device).to(torch.int32)
        self.counts, self._passes = message.split([len(self.local), len(passes)])
        (work,) = transport.start(transport.all_reduce(message))
        self._wait = partial(transport.wait, work)
        self._counts_on_host = None

    def check_passes(self) -> None:
        """Wait for the exchange; RuntimeError if the ranks have made different numbers of passes."""
        assert self._wait is not None
        self._wait()
        if (problem := out_of_step(self._passes.tolist())) is not None:
            raise RuntimeError(problem)

    def used_anywhere(self, index: int) -> bool:
        """Whether any rank has a gradient for a parameter. Waits for the exchange only if this rank has none."""
        if self.local[index]:
            return True
        if self._counts_on_host is None:
            self.check_passes()
            self._counts_on_host = self.counts.tolist()
        return self._counts_on_host[index] > 0

    def exchange_none(self, transport: GroupTransport) -> list[int]:
        """Take part in an exchange on a rank that uses no parameter. Returns the number of ranks that use each one."""
        message = torch.zeros(len(self.local) + transport.world_size, dtype=torch.int32, device=self._device)
        (work,) = transport.start(transport.all_reduce(message))
        transport.wait(work)
        return message[: len(self.local)].tolist()

    def clear(self) -> None:
        """Start over for the next reduction, once the exchange is done."""
        if self._wait is not None and self._counts_on_host is None:
            self._wait()
        self.local = bytearray(len(self.local))
        self._wait = self._counts_on_host = None


class DelayedGradients:
    """The gradients of the parameters that no bucket has, in one flat buffer.

    Args:
        parameters: the delayed parameters.
        buffer: as many elements as the parameters have, in their dtype and on their device.
    """

    def __init__(self, parameters: Sequence[Tensor], buffer: Tensor) -> None:
        self.parameters, self.buffer = parameters, buffer
        parts = buffer.split([parameter.numel() for parameter in parameters])
        self._views = [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]

    def collect(self) -> Tensor:
        """Make every gradient a view of the buffer, where one was cleared or replaced after the forward; returns the
        buffer.
        """
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view.copy_(parameter.grad.to_dense())
        return self.buffer


@cache
def _count_registrations() -> None:
    def counted(_: nn.Module, __: str, ___: Any) -> None:
        global _latest
        _latest = next(_registrations)

    modules.register_module_parameter_registration_hook(counted)
    modules.register_module_module_registration_hook(counted)


class ModelWatch:
    """Compares the trainable parameters of a model with the ones that its reducer averages.

    Names are compared after a parameter was registered in this process, which assignments and
    ``load_state_dict(assign=True)`` do, too, and every `FORWARDS_BETWEEN_CHECKS` forwards. Other forwards cost less
    than 1 us, and 0.03 us for each frozen parameter.
    """

    def __init__(self, module: nn.Module, known: Collection[Tensor], ignored: Collection[str]) -> None:
        _count_registrations()
        self._module = module
        self._known = set(known)  # kept alive: no other parameter may get the same id()
        # Wrappers of submodules, such as checkpointing's, change names.
        self._known.update(parameter for name, parameter in module.named_parameters() if name in ignored)
        self._ignored = ignored
        self._remember()

    def _remember(self) -> None:
        self._seen = _latest
        self._forwards = 0
        self._frozen = [
            parameter
            for name, parameter in self._module.named_parameters()
            if not parameter.requires_grad and name not in self._ignored
        ]

    def find_unknown(self) -> str | None:
        """The name of a trainable parameter that is not averaged; None if there is none."""
        self._forwards += 1
        if (
            self._seen == _latest
            and self._forwards < FORWARDS_BETWEEN_CHECKS
            and not any(map(_requires_grad, self._frozen))
        ):
            return None
        for name, parameter in self._module.named_parameters():
            # `torch.func.functional_call` replaces parameters by plain tensors.
            is_trained = parameter.requires_grad and isinstance(parameter, nn.Parameter)
            if is_trained and name not in self._ignored and parameter not in self._known:
                return name
        self._remember()
        return None


# Several wrappers of one parameter. Averaging twice gives the same mean for twice the traffic. Nesting only warns,
# because PyTorch's own tests nest wrappers. If the inner wrapper has a communication hook, it raises: the outer wrapper
# sends the same gradients without the hook. Models that share a layer and are trained in one backward are no mistake.


def find_sharing_wrappers(wrapper: Any) -> None:
    """Before its first forward, find the live wrappers that share parameters with ``wrapper``; see
    `Reducer.share`.
    """
    if wrapper not in _have_run_forward:
        _have_run_forward.add(wrapper)
        _share(wrapper)


@torch_internals.not_compiled
def _share(wrapper: Any) -> None:
    mine = {id(parameter) for parameter in wrapper.reducer.parameters}
    other: Any
    for other in {*_have_run_forward, *live_wrappers()}:
        shared = {id(parameter) for parameter in other.module.parameters()} & mine if other is not wrapper else None
        if shared:
            wrapper.reducer.share(other, shared)
            if hasattr(other.reducer, "share"):
                other.reducer.share(wrapper, shared)
            elif wrapper.gradient_as_bucket_view and other.gradient_as_bucket_view:
                raise ValueError(errors.SHARED_VIEWS)


def check_no_wrapper_inside(module: nn.Module) -> None:
    """Warn if ``module`` is or contains a wrapper of parameters that a new wrapper would reduce again.

    Raises ValueError if that wrapper has a communication hook, or is FSDP2's.
    """
    for name, part in module.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(part).__mro__):  # without importing FSDP
            where = f"its submodule {name} is" if name else "it is"
            raise ValueError(errors.SHARDED.format(where=where))
    wrappers = [(name, part) for name, part in module.named_modules() if isinstance(part, TorchDDP)]
    if not wrappers:
        return
    ours = _reduced(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, wrapper in wrappers:
        both = ours.keys() & _reduced_by(wrapper).keys()
        if both:
            kind = f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"
            where = f"contains a {kind} ({name})" if name else "is a DistributedDataParallel"
            names = errors.some(sorted(ours[parameter] for parameter in both))
            text = errors.WRAPPED_TWICE.format(where=where, names=names)
            if wrapper._comm_hooks:
                raise ValueError(text)
            warnings.warn(text, stacklevel=3)


def check_not_nested(inner: TorchDDP) -> None:
    """Warn once if ``inner`` runs in the forward of a wrapper of its parameters; RuntimeError if ``inner``
    has a hook.
    """
    outer = TorchDDP._active_ddp_module
    if outer is None or outer is inner or outer in _checked.get(inner, ()):
        return
    theirs = _reduced_by(outer)
    both = theirs.keys() & _reduced_by(inner).keys()
    if both:
        names = errors.some(sorted(theirs[parameter] for parameter in both))
        text = errors.WRAPPED_BY_ANOTHER.format(kind=type(outer), names=names)
        if inner._comm_hooks:
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=3)
    _checked.setdefault(inner, WeakSet()).add(outer)


def _reduced_by(wrapper: TorchDDP) -> dict[Tensor, str]:
    return _reduced(wrapper.module, wrapper.parameters_to_ignore) | {
        parameter: "(delayed)" for parameter in wrapper._delay_all_reduce_params
    }


def _reduced(module: nn.Module, ignored: Collection[str]) -> dict[Tensor, str]:
    """The parameters that a wrapper reduces, and their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {parameter: name for name, parameter in named if parameter.requires_grad and name not in ignored}
