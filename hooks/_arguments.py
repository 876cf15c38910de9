"""Argument checks of hooks and states."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

Hook = TypeVar("Hook", bound=Callable[..., Any])
_hooks: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
StateCheck = Callable[[str, object], None]  # of the hook's name and its state


def described(value: object) -> str:
    """A value for an error message: short values in full, others by type."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"an object of type {type(value).__qualname__}"


def check_process_group(value: object, argument: str = "process_group") -> None:
    """Raise TypeError unless ``value`` is a process group, or None for the default one."""
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise TypeError(
            f"{argument} is {described(value)}; expected a torch.distributed.ProcessGroup, as dist.new_group() returns "
            "it, or None for the model's process group."
        )


def needs_process_group(hook_name: str, state: object) -> None:
    """A check for `ddp_hook`: the state must be a process group or None."""
    check_process_group(state, f"The state of {hook_name}")


def needs_state(kind: type) -> StateCheck:
    """A check for `ddp_hook`: the state must be a ``kind``."""

    def check(hook_name: str, state: object) -> None:
        if not isinstance(state, kind):
            raise TypeError(
                f"The state of {hook_name} is {described(state)}; expected a gradwire {kind.__name__}: "
                f"model.register_comm_hook({kind.__name__}(process_group), {hook_name})."
            )

    return check


def needs_nothing(_: str, __: object) -> None:
    """A check for `ddp_hook`: any state is accepted."""


def ddp_hook(check_state: StateCheck) -> Callable[[Hook], Hook]:
    """Decorate a hook to raise TypeError for a wrong state or bucket before it does anything."""

    def decorate(hook: Hook) -> Hook:
        names = list(inspect.signature(hook).parameters)

        @functools.wraps(hook)
        def checked(*arguments: Any, **named: Any) -> Any:
            bucket = arguments[1] if len(arguments) > 1 else named.get("bucket")
            if len(arguments) > len(names) or not (hasattr(bucket, "buffer") and hasattr(bucket, "parameters")):
                raise TypeError(
                    f"{checked.__name__} was called with {described(bucket)} in place of a bucket of gradients. It is "
                    "a communication hook for DistributedDataParallel, of PyTorch or of gradwire; neither "
                    "FullyShardedDataParallel nor compiled autograd's Python reducer can call it."
                )
            check_state(checked.__name__, arguments[0] if arguments else named.get(names[0]))
            return hook(*arguments, **named)

        _hooks.add(checked)
        return cast("Hook", checked)

    return decorate


def is_gradwire_hook(hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is one of gradwire's, a 16-bit wrapper included."""
    return any(each is hook for each in _hooks)  # a hook need not be hashable
