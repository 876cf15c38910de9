"""`ErrorFeedbackState`: step count and checkpoints of the hooks with error feedback."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Transport, executor_for
from gradwire.comm.store_collectives import named_barrier
from gradwire.comm.torch_internals import default_group
from gradwire.hooks._parameter_names import NamedState, is_number
from gradwire.hooks._state_validation import MAX_COUNT, check_count
from gradwire.hooks._types import GradBucket, StepBoundary
from gradwire.kernels import memory_order

# How long a rank waits for the others. Short for `state_dict`: a rank that waits is probably the only one to call it.
STATE_DICT_TIMEOUT = timedelta(seconds=10)
PREPARE_TIMEOUT = timedelta(minutes=2)


class Policy(Protocol):
    """When compression starts, and options by name pattern."""

    @property
    def start_iteration(self) -> int:
        """The first compressed step."""

    def unmatched_pattern(self, names: Iterable[str]) -> str | None:
        """The first pattern that matches none of the names; None if all match."""


class CountingState(NamedState):
    """A hook's state that counts steps.

    Args:
        hook: name of the hook, for error messages.

    Attributes:
        iter: number of steps so far, equal on all ranks, which compare it after an assignment.
    """

    def __init__(self, hook: str) -> None:
        super().__init__(hook)
        self._iter = 0
        self._boundary = StepBoundary()
        self._is_counted = True  # whether ``iter`` includes the latest step

    @property
    def iter(self) -> int:
        return self._iter

    @iter.setter
    def iter(self, iteration: int) -> None:
        check_count("iter", iteration)
        self.continue_at(iteration)
        self.expect_handshake()

    def continue_at(self, iteration: int) -> None:
        """Let ``iteration`` be the number of the next step."""
        self._iter, self._is_counted = iteration, True

    def begins_step(self, bucket: GradBucket) -> bool:
        """Whether ``bucket`` is the first of its step. Call it once for every bucket, before anything else.

        If the last bucket of the step before was skipped or went to another hook, that step is counted now.
        """
        if not self._boundary.is_before(bucket):
            return False
        if not self._is_counted:
            self.count_step()
        return True

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count the step if ``bucket``, which raised no error, is its last."""
        self._is_counted = False
        if bucket.is_last():
            self.count_step()

    def count_step(self) -> None:
        """Count a step that has ended."""
        self.continue_at(min(self._iter + 1, MAX_COUNT))


class ErrorFeedbackState(CountingState):
    """A hook's state with error memory by parameter name, which is summed over the ranks for a checkpoint.

    Args:
        hook: name of the hook, for error messages.
    """

    options: Any

    def __init__(self, hook: str) -> None:
        super().__init__(hook)
        self._settings_of_buckets: dict[str, object] | None = None
        self._is_loaded = False  # whether the memory is from a checkpoint
        self._patterns_match = False  # whether every name pattern in the options is known to match a parameter
        self._prepared: dict[str, Any] | None = None  # what `state_dict` returns until the next step
        self._has_announced_start = False

    @property
    def policy(self) -> Policy:
        """How each parameter is compressed, under the current options."""
        raise NotImplementedError

    def bind(self, module: torch.nn.Module) -> None:
        """Take parameter names from ``module``.

        Rarely needed: gradwire's DDP binds the state when the hook is registered, and the model in
        PyTorch's DDP is found at the first step or checkpoint. It is not found if several models share
        parameters and your own hook passes the state on, or if ``gc.freeze()`` has hidden the DDP.
        Training works then, but options by name and checkpoints raise. To prevent that, call `bind`
        before the first step, on every rank.

        Args:
            module: the model, wrapped or not.

        Raises:
            ValueError: the state is bound to another model or has trained without names, or a name pattern in the
                options matches no parameter of ``module``.
        """
        super().bind(module)
        self._check_patterns()

    def _check_patterns(self) -> None:
        """Raise ValueError if a pattern matches no parameter, once all names are known."""
        if self._patterns_match or not self._names.is_complete:
            return
        names = sorted(self._names.known())
        if (unmatched := self.policy.unmatched_pattern(names)) is not None:
            numbered = all(is_number(name) for name in names)
            remedy = "Call state.bind(model), which names them, or use" if numbered else "Correct or remove it:"
            raise ValueError(
                f"{unmatched} matches none of the model's {len(names)} parameters, {', '.join(names[:5])}, ... "
                f"{remedy} patterns of whole names as in `fnmatch`, such as '*.weight'."
            )
        self._patterns_match = True

    def announce_start(self, logger: logging.Logger) -> None:
        """Log when compression starts, at the first call and on the first rank, if it has not started yet."""
        start = self.policy.start_iteration
        if not self._has_announced_start and self.iter < start and dist.get_rank(self._group) == 0:
            # Two plain steps are no surprise: DDP rebuilds its buckets after the first.
            level = logging.INFO if start <= 2 else logging.WARNING
            logger.log(
                level, "%s compresses from step %d on, and sends gradients in full until then.", self.hook_name, start
            )
        self._has_announced_start = True

    def count_step(self) -> None:
        """Count a step that has ended."""
        super().count_step()
        self._names.close()

    def apply_options(self) -> None:
        """Apply options that were assigned or modified since the last step: make buckets anew, which keep the errors.

        Raises:
            ValueError: an option has the wrong type or is out of range.
        """
        if self._settings_of_buckets != (settings := self.settings()):
            self.options = replace(self.options)  # validates: dictionaries may have been modified in place
            self._settings_of_buckets, self._patterns_match = settings, False
            self.drop_buckets()

    def drop_buckets(self) -> None:
        """Drop all buckets, and keep their errors for those that follow."""
        raise NotImplementedError

    def prepare_checkpoint(self) -> None:
        """Collect the errors of all ranks, and keep the copy for `state_dict` until the next step.

        A collective call: every rank must make it, between two steps. Afterwards, any rank may call
        `state_dict` alone, for trainers that save on rank 0. The copy takes CPU memory on every rank.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within two
                minutes.

        Examples:
            >>> state.prepare_checkpoint()
            >>> if dist.get_rank() == 0:
            ...     torch.save({"model": model.state_dict(), "hook": state.state_dict()}, path)
        """
        self._prepared = None
        self._check_can_be_saved()
        named_barrier(self._group, f"{type(self).__name__}.prepare_checkpoint()", timeout=PREPARE_TIMEOUT)
        self._prepared = self._collected()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain CPU tensors and numbers, for ``torch.load(weights_only=True)``.

        A collective call: every rank must make it, between two steps. The result is equal on all
        ranks. Between `prepare_checkpoint` and the next step, any rank may call it alone: it then
        returns the prepared copy, and two such calls share tensors.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within ten
                seconds. A later call on all ranks works.
        """
        if self._prepared is not None:
            return {key: dict(value) if isinstance(value, dict) else value for key, value in self._prepared.items()}
        self._check_can_be_saved()
        try:
            named_barrier(self._group, f"{type(self).__name__}.state_dict()", timeout=STATE_DICT_TIMEOUT)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} To save on some ranks only, call state.prepare_checkpoint() on every rank, then "
                "state.state_dict() where you save."
            ) from error
        return self._collected()

    def _collected(self) -> dict[str, Any]:
        """A new `state_dict`. A collective call."""
        raise NotImplementedError

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.process_group or default_group()

    def _check_can_be_saved(self) -> None:
        """Raise RuntimeError if a checkpoint would hold numbers instead of names, or no entries."""
        self._names.search()
        self._names.require(f"A checkpoint of a {type(self).__name__}")
        if self._names.module is None and self.iter == 0 and not self._is_loaded:
            raise RuntimeError(
                f"This {type(self).__name__} has no model yet, so the entries of its checkpoint are not known. "
                f"Register it with model.register_comm_hook(state, {self.hook_name}), or call state.bind(model), "
                "before it is saved or loaded."
            )


def sum_errors(
    errors: Mapping[str, Tensor], process_group: dist.ProcessGroup | None, parameters: Sequence[Tensor], divisor: int
) -> dict[str, Tensor]:
    """The sums over the ranks of ``error / divisor``, as new tensors on the CPU. A collective call.

    Args:
        errors: of this rank, by parameter name; the same names and shapes on all ranks.
        process_group: the ranks; None for the model's.
        parameters: of the model, if it is known. The collectives run on their device.
        divisor: 1 for the sum, the world size for the mean.
    """
    if not errors:
        return {}
    device = next(iter([*parameters, *errors.values()])).device
    executor = executor_for(process_group, device)
    sums: dict[str, Tensor] = executor.submit(lambda _: _summed(errors, executor.transport, device, divisor)).wait()
    return sums


async def _summed(
    errors: Mapping[str, Tensor], transport: Transport, device: torch.device, divisor: int
) -> dict[str, Tensor]:
    sums = {}
    for name in sorted(errors):
        total = errors[name].to(device) / divisor
        await transport.all_reduce(memory_order(total))
        sums[name] = total.contiguous().cpu()
    return sums


def check_loaded_names(loaded: Mapping[str, object], names: Sequence[str]) -> None:
    """Raise ValueError if a loaded memory has names and a bucket has numbers, or vice versa."""
    if loaded and set(loaded).isdisjoint(names):
        numbered = [all(is_number(name) for name in some) for some in (loaded, names)]
        if numbered[0] != numbered[1]:
            raise ValueError(
                f"The loaded state has an entry {min(loaded)!r}, this bucket has {names[0]!r}: parameter names were "
                "known in only one of the two runs. Call state.bind(model) before the first step in both."
            )
