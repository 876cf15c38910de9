"""What changes in a model after it was wrapped: `ModelWatch` for parameters, `BufferWatch` for a first buffer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import count
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules

FORWARDS_BETWEEN_CHECKS = 64  # also after changes that bypass `nn.Module.register_parameter`

_requires_grad = attrgetter("requires_grad")
_registrations = count()
_latest = -1  # number of the latest registration of a parameter or a submodule, in any module of this process
_latest_buffer = -1  # likewise of a buffer or a submodule


@cache
def _count_registrations() -> None:
    def counted(_: nn.Module, __: str, ___: Any) -> None:
        global _latest
        _latest = next(_registrations)

    def counted_buffer(_: nn.Module, __: str, ___: Any) -> None:
        global _latest_buffer
        _latest_buffer = next(_registrations)

    modules.register_module_parameter_registration_hook(counted)
    modules.register_module_module_registration_hook(counted)
    modules.register_module_module_registration_hook(counted_buffer)
    modules.register_module_buffer_registration_hook(counted_buffer)


class ModelWatch:
    """Compares the trainable parameters of a model with the ones that its reducer averages.

    Names are compared after a parameter was registered in this process, which assignments and
    ``load_state_dict(assign=True)`` do, too, and every `FORWARDS_BETWEEN_CHECKS` forwards. Other forwards cost less
    than 1 us, and 0.03 us for each frozen parameter.

    A hook of ``register_post_accumulate_grad_hook`` runs before the reducer's. One that steps an optimizer shows in the
    version of its parameter; to look for such hooks takes 0.05 us a parameter in each backward.
    """

    def __init__(
        self, module: nn.Module, known: Sequence[Tensor], delayed: Sequence[Tensor], ignored: Collection[str]
    ) -> None:
        _count_registrations()
        self._module = module
        self._averaged = [*known, *delayed]
        self._versions: list[tuple[Tensor, int]] = []  # before the backward, of the parameters with such hooks
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
        owners: dict[Tensor, tuple[dict[str, Any], str]] = {}
        for part in self._module.modules():
            owners |= {each: (part._parameters, key) for key, each in part._parameters.items() if each is not None}
        # The dictionary of a module that has each averaged parameter, and its key there.
        self._owners = [owners.get(each, ({}, "")) for each in self._averaged]

    def is_due(self) -> bool:
        """Count a forward; returns whether to call `find_unknown`."""
        self._forwards += 1
        return (
            self._seen != _latest or self._forwards >= FORWARDS_BETWEEN_CHECKS or any(map(_requires_grad, self._frozen))
        )

    def are_replaced(self, indices: Iterable[int]) -> bool:
        """Whether any of these averaged parameters is no longer where `find_unknown` has seen it: call it again."""
        for index in indices:
            table, key = self._owners[index]
            if table.get(key) is not self._averaged[index]:
                return True
        return False

    def find_unknown(self) -> str | None:
        """The name of a trainable parameter that is not averaged; None if there is none."""
        for name, parameter in self._module.named_parameters():
            # `torch.func.functional_call` replaces parameters by plain tensors.
            is_trained = parameter.requires_grad and isinstance(parameter, nn.Parameter)
            if is_trained and name not in self._ignored and parameter not in self._known:
                return name
        self._remember()
        return None

    def begin_backward(self) -> None:
        """Note the versions of the parameters with hooks that may step an optimizer in the next backward."""
        self._versions = [(each, each._version) for each in self._averaged if each._post_accumulate_grad_hooks]

    def end_backward(self) -> None:
        """Note the versions of all parameters: nothing may change them until `find_stepped`."""
        self._versions += [(each, each._version) for each in self._averaged]

    def find_stepped(self) -> str | None:
        """The name of a parameter that has changed since its version was noted; None if there is none."""
        for parameter, version in self._versions:
            if parameter._version != version:
                return next(name for name, each in self._module.named_parameters() if each is parameter)
        return None

    def marks(self) -> list[tuple[int, ...]]:
        """Numbers that differ from earlier ones if a parameter or a gradient was changed or replaced since."""
        grads = [each.grad for each in self._averaged]
        of_grads = [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]
        return [(each._version, *marks) for each, marks in zip(self._averaged, of_grads, strict=True)]


class BufferWatch:
    """Notices that a model without buffers may have its first one."""

    def __init__(self) -> None:
        _count_registrations()
        self._seen = _latest_buffer

    def is_due(self) -> bool:
        """Whether a buffer or a submodule was registered in this process since the last call."""
        before, self._seen = self._seen, _latest_buffer
        return before != self._seen
