"""Decorators of hooks: `ddp_hook` checks the arguments.

`zero_copy` marks a hook that needs no flat buffer, `replayable` one whose recorded steps replace its calls.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.exchange.bucket import GradBucket

CommHook = Callable[[Any, GradBucket], Future[torch.Tensor]]
Hook = TypeVar("Hook", bound=Callable[..., object])

# Not attributes of the hook: functools.wraps would copy them to a user's wrapper, which expects flat buffers.
_zero_copy_hooks: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
_replayable_hooks: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
_gradwire_hooks: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()


def _is_among(hook: Callable[..., object], marked: weakref.WeakSet[Callable[..., object]]) -> bool:
    return any(each is hook for each in marked)  # a hook need not be hashable


def zero_copy(hook: Hook) -> Hook:
    """Mark a hook as zero-copy: it gets its gradients from `Bucket.work`, so they need not be in a flat buffer."""
    _zero_copy_hooks.add(hook)
    return hook


def is_zero_copy(hook: Callable[..., object]) -> bool:
    """Whether ``hook`` is marked by `zero_copy`."""
    return _is_among(hook, _zero_copy_hooks)


def replayable(hook: Hook) -> Hook:
    """Mark a zero-copy hook that only reduces: on a GPU, gradwire's reducer may repeat a recorded step without it."""
    _replayable_hooks.add(hook)
    return zero_copy(hook)


def is_replayable(hook: Callable[..., object]) -> bool:
    """Whether ``hook`` is marked by `replayable`."""
    return _is_among(hook, _replayable_hooks)


def name_of(hook: object) -> str:
    """The name of a hook, for reports and error messages."""
    return str(getattr(hook, "__name__", "hook"))


def described(value: object) -> str:
    """A value for an error message: short values in full, others by type."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"an object of type {type(value).__qualname__}"


def by_name(value: object) -> str:
    """The remedy for a string in place of a state or of its process group."""
    return f" To name a hook, call gradwire.attach(model, {value!r})." if isinstance(value, str) else ""


def check_process_group(value: object, argument: str = "process_group", remedy: str = "") -> None:
    """Raise TypeError, which ends with ``remedy``, unless ``value`` is a process group or None."""
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise TypeError(
            f"{argument} is {described(value)}; expected a torch.distributed.ProcessGroup, as dist.new_group() returns "
            f"it, or None for the model's process group.{remedy}"
        )


def _refuse_state(hook_name: str, state: object, kinds: tuple[type, ...]) -> None:
    if dist.ProcessGroup in kinds:
        check_process_group(state, f"The state of {hook_name}", by_name(state))
        return
    kind = kinds[0]
    # PyTorch has some of gradwire's names, too.
    what = f"{'a gradwire' if kind.__module__.startswith('gradwire.') else 'an instance of'} {kind.__name__}"
    raise TypeError(
        f"The state of {hook_name} is {described(state)}; expected {what}: "
        f"model.register_comm_hook({kind.__name__}(process_group), {hook_name}).{by_name(state)}"
    )


def ddp_hook(*kinds: type, wrapped: Callable[..., Any] | None = None) -> Callable[[Hook], Hook]:
    """Decorate a hook: raise TypeError for a state of another class than ``kinds``, or without a bucket.

    Without ``kinds``, any state is accepted. With ``ProcessGroup`` among them, None is accepted, too. A hook that calls
    a ``wrapped`` one is gradwire's if that is.
    """

    def decorate(hook: Hook) -> Hook:
        names = list(inspect.signature(hook).parameters)

        @functools.wraps(hook)
        def checked(*arguments: Any, **named: Any) -> Any:
            state = arguments[0] if arguments else named.get(names[0])
            if kinds and not isinstance(state, kinds):
                _refuse_state(checked.__name__, state, kinds)
            bucket = arguments[1] if len(arguments) > 1 else named.get("bucket")
            if len(arguments) > len(names) or not (hasattr(bucket, "buffer") and hasattr(bucket, "parameters")):
                raise TypeError(
                    f"{checked.__name__} was called with {described(bucket)} in place of a bucket of gradients. It is "
                    "a communication hook for DistributedDataParallel, of PyTorch or of gradwire; neither "
                    "FullyShardedDataParallel nor compiled autograd's Python reducer can call it."
                )
            return hook(*arguments, **named)

        if wrapped is None or is_gradwire_hook(wrapped):
            _gradwire_hooks.add(checked)
        return cast("Hook", checked)

    return decorate


def is_gradwire_hook(hook: Callable[..., object]) -> bool:
    """Whether ``hook`` is one of gradwire's, or a 16-bit wrapper of one."""
    return _is_among(hook, _gradwire_hooks)
