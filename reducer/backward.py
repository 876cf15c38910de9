"""`Backward`: the state of one backward."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch.futures import Future

from gradwire.comm.stream_executor import Handle
from gradwire.comm.torch_internals import EndCallback
from gradwire.comm.transport import clear_frames
from gradwire.reducer.bucket import ReducerBucket
from gradwire.reducer.unused_parameters import UsedParameters


class Phase(Enum):
    """The progress of a backward."""

    PREPARED = "no gradient is ready yet"
    REDUCING = "gradients are ready, and buckets are launched once they are complete"
    DONE = "all results are in the gradients, or the backward was discarded"
    AGAIN = "gradients of a further backward of a synchronized forward come in; its end reduces all buckets"


class Backward:
    """The state of one synchronized backward pass.

    A gradient is *ready* once autograd adds nothing more to it. A bucket is *complete* once all its gradients are
    ready. It is *launched* once it and all buckets before it are complete. If the backward ``may_leave_out``
    parameters, the ranks exchange which of them are ``used``.
    """

    def __init__(self, buckets: list[ReducerBucket], phase: Phase, may_leave_out: bool, used: UsedParameters) -> None:
        n_parameters = len(used.local)
        self.phase, self.may_leave_out, self.used = phase, may_leave_out, used
        self.is_again = phase is Phase.AGAIN  # whether it is not the first of its forward
        self.follower = EndCallback()  # queued while a further backward of its forward runs
        self.divisor = 1  # of sums over ranks: the world size; in `join`, the number of ranks with inputs left
        self.ready = bytearray(n_parameters)  # 1 for each parameter whose gradient is ready
        self.ready_order: list[int] = []  # of parameters, as autograd completed their gradients; without unused ones
        self.n_pending = [len(bucket.members) for bucket in buckets]  # gradients that each bucket still waits for
        self.expected_in = -1  # position of the bucket of which a hook is not deferred, so that its end is noticed
        self.calls = [0] * n_parameters  # of each parameter's autograd hook, with a static graph
        self.delay = EndCallback()  # `_delay_all_reduce`
        self.n_launched = 0  # buckets, skipped ones included
        self.skipped: set[int] = set()  # positions of the buckets that are not reduced: no parameter of them is used
        # None before the launch, and if not reduced.
        self.futures: list[Future[Any] | Handle | None] = [None] * len(buckets)

    @property
    def missing(self) -> list[int]:
        """The parameters whose gradients are not ready."""
        return [index for index, is_ready in enumerate(self.ready) if not is_ready]

    def take_values(self) -> list[Any]:
        """The values of the futures that are done; None for the others and for failed ones. Drops the futures.

        On a GPU, the current stream waits for the values.
        """
        values = []
        while self.futures:
            future = self.futures.pop(0)
            try:
                values.append(future.wait() if future is not None and future.done() else None)
            except Exception as error:
                clear_frames(error)
                values.append(None)
            finally:
                del future  # it holds the error, too
        return values
