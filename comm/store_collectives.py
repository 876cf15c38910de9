"""Barriers and gathers through the process group's key-value store instead of its collectives.

They work while collectives are stuck, and a rank that waits knows which ranks are missing.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from gradwire.comm.rank_differences import format_differences, format_ranks
from gradwire.comm.torch_internals import PrefixStore, Store, can_delete_keys, device_timeouts, port_of, store_of_group

DEFAULT_TIMEOUT = timedelta(minutes=2)
POLL_SECONDS = 0.5  # interval between two calls of the `check` that may end a wait
ANSWER_SECONDS = 5.0  # how long a rank waits for the answer to a short request, also on a busy machine
EXIT_SECONDS = 10.0  # longest delay of the exit; by then rank 0 has usually exited, and closed the connection
KEYS_AT_ONCE = 16  # of one request: a poll stays small with thousands of ranks
SHUTDOWN_SECONDS = 1.0  # longest wait for a request whose connection is shut down
WARN_AFTER = timedelta(seconds=20)  # a rank that has waited this long logs which ranks are missing

NO_STORE = (
    "Rank 0, which hosts the store of this process group, has ended or has given no answer within {seconds:.0f} "
    "seconds. Restart the job from a checkpoint."
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Calls of `store_all_gather` by purpose, for each process group's store. PyTorch drops the store with the group.
_calls: weakref.WeakKeyDictionary[Store, Counter[str]] = weakref.WeakKeyDictionary()
# The store that each thread asks.
_store_of_thread: weakref.WeakKeyDictionary[threading.Thread, Store] = weakref.WeakKeyDictionary()


class RanksMissing(RuntimeError):
    """Some ranks, ``ranks`` by their numbers in the default group, did not join a store collective in time."""

    def __init__(self, purpose: str, ranks: list[int], timeout: timedelta) -> None:
        who = f"ranks {ranks} have not made it" if ranks else "some ranks have not made it"
        super().__init__(f"{purpose} is a collective call: {who} within {timeout}. Call it on every rank.")
        self.ranks, self.timeout = ranks, timeout


def gradwire_store(group: dist.ProcessGroup) -> Store:
    """The group's key-value store, under a prefix of gradwire's own."""
    return PrefixStore("gradwire", store_of_group(group))


def collective_timeout(group: dist.ProcessGroup) -> timedelta:
    """The shortest collective timeout of the group's backends."""
    return min(device_timeouts(group, DEFAULT_TIMEOUT).values(), default=DEFAULT_TIMEOUT)


def store_all_gather(
    group: dist.ProcessGroup,
    purpose: str,
    value: str,
    timeout: timedelta | None = None,
    check: Callable[[], None] = lambda: None,
    hint: str = "",
) -> list[str]:
    """Return the value of every rank, a few kilobytes at most, in rank order. A collective call.

    The n-th call on one rank joins the n-th call for the same purpose on the others. The first rank that has seen all
    others, or has given up, decides the outcome for all; a rank that comes after a failed attempt joins the next one.
    The last rank to leave an attempt deletes its keys.

    Args:
        group: the ranks.
        purpose: names the call, in errors too.
        value: this rank's value.
        timeout: longest wait for the other ranks, and for an answer of the store; None for the group's timeout.
        check: called every `POLL_SECONDS` while waiting; raises to end the wait.
        hint: the likely cause of a long wait, for the warning.

    Raises:
        RanksMissing: some ranks did not call within ``timeout``; names them.
        RuntimeError: the store gives no answer.
    """
    timeout = collective_timeout(group) if timeout is None else timeout
    requests = StoreRequests(PrefixStore("meet", gradwire_store(group)))
    calls = _calls.setdefault(store_of_group(group), Counter())
    n_ranks = group.size()

    def join(store: Store) -> str:
        while True:
            calls[purpose] += 1
            attempt = f"{purpose}/{calls[purpose]}"
            if text_at(store, f"{attempt}/outcome") != "failed":
                store.set(f"{attempt}/{group.rank()}", value)
                return attempt
            _leave(store, attempt, n_ranks)

    def decide(store: Store, outcome: str) -> list[str] | None:
        """The values of all ranks if the first rank to decide has seen all; else None."""
        decided = store.compare_set(f"{attempt}/outcome", "", outcome)
        return _values(store, keys) if decided == b"met" else None

    def give_up(store: Store) -> None:
        decide(store, "failed")
        _leave(store, attempt, n_ranks)

    attempt = requests.require(join, timeout)
    keys = [f"{attempt}/{rank}" for rank in range(n_ranks)]
    try:
        missing = wait_for_ranks(group, requests, keys, min(timeout, WARN_AFTER), check)
        if missing and timeout > WARN_AFTER:
            text = "%s: still waiting for %s after %s.%s"
            logger.warning(text, purpose, format_ranks(missing), WARN_AFTER, hint and f" {hint}")
            missing = wait_for_ranks(group, requests, keys, timeout - WARN_AFTER, check)
    except BaseException:
        requests.tell(give_up)
        raise
    values = requests.require(lambda store: decide(store, "failed" if missing else "met"), timeout)
    requests.tell(lambda store: _leave(store, attempt, n_ranks))
    if values is None:
        raise RanksMissing(purpose, missing, timeout)
    return values


def gather_json(
    group: dist.ProcessGroup, purpose: str, value: object, check: Callable[[], None] = lambda: None
) -> list[Any]:
    """Every rank's value, through the store. A collective call. ``check`` may raise to end the wait."""
    return list(map(json.loads, store_all_gather(group, purpose, json.dumps(value), check=check)))


def differences_between_ranks(
    group: dist.ProcessGroup,
    purpose: str,
    facts: Mapping[str, str],
    timeout: timedelta | None = None,
    check: Callable[[], None] = lambda: None,
    hint: str = "",
) -> str:
    """One line for each of the facts that differs between ranks; empty if none does. A collective call.

    The ranks exchange a digest of the facts, their order included; and the facts if these differ. See
    `store_all_gather` for the arguments and errors.
    """
    text = json.dumps(facts)
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    if len(set(store_all_gather(group, purpose, digest, timeout, check, hint))) == 1:
        return ""
    texts = store_all_gather(group, f"{purpose}, after a mismatch", text, check=check)
    by_rank, ranks = [json.loads(each) for each in texts], dist.get_process_group_ranks(group)
    return format_differences(by_rank, ranks) or format_differences([{"order": ", ".join(f)} for f in by_rank], ranks)


class StoreRequests:
    """Short requests to a store that end soon even if rank 0, which hosts it, is out of reach.

    A request of PyTorch's store may wait for its answer until TCP gives up, a quarter of an hour. So each is made in a
    thread of its own, one after another.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = threading.Lock()
        self._late: queue.SimpleQueue[Any] | None = None  # gets the answer of the latest request that had none in time

    @property
    def is_stuck(self) -> bool:
        """Whether a request still has no answer."""
        return self._late is not None and self._late.empty()

    def ask(self, request: Callable[[Store], T], seconds: float = ANSWER_SECONDS) -> T | None:
        """The answer; None if the store refuses the request, or has no answer in time, or none to an earlier one."""
        return None if self.is_stuck else self._wait(self._start(request), seconds)

    def require(self, request: Callable[[Store], T], timeout: timedelta) -> T:
        """The answer; RuntimeError, from that of the request, if it fails or has no answer within ``timeout``."""
        errors: list[Exception] = []

        def noted(store: Store) -> tuple[T]:
            try:
                return (request(store),)
            except Exception as error:
                errors.append(error)
                raise

        answer = self.ask(noted, timeout.total_seconds())
        if answer is None:
            raise RuntimeError(NO_STORE.format(seconds=timeout.total_seconds())) from next(iter(errors), None)
        return answer[0]

    def tell(self, request: Callable[[Store], object]) -> None:
        """Make a request that needs no answer, as soon as the store has answered the earlier ones."""
        was_stuck = self.is_stuck
        answers = self._start(request)
        if not was_stuck:
            self._wait(answers, ANSWER_SECONDS)

    def _start(self, request: Callable[[Store], T]) -> queue.SimpleQueue[T | None]:
        answers: queue.SimpleQueue[T | None] = queue.SimpleQueue()

        def make() -> None:
            answer = None
            with suppress(Exception), self._turn:  # rank 0 may have exited
                answer = request(self._store)
            answers.put(answer)

        try:
            thread = threading.Thread(target=make, name="gradwire store", daemon=True)
            _store_of_thread[thread] = self._store
            thread.start()
        except RuntimeError:  # the interpreter is ending
            if not self._turn.locked():
                make()
        return answers

    def _wait(self, answers: queue.SimpleQueue[T | None], seconds: float) -> T | None:
        try:
            return answers.get(timeout=seconds)
        except queue.Empty:
            self._late = answers
            return None


@atexit.register
def _finish_requests() -> None:
    """End all requests: a thread that returns from C++ while the interpreter is finalized aborts the process.

    Those without an answer after `EXIT_SECONDS` end when their connection is shut down, where there is /proc.
    """
    in_flight = {thread: _store_of_thread[thread] for thread in threading.enumerate() if thread in _store_of_thread}
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in in_flight:
        thread.join(max(0.0, deadline - time.monotonic()))
    ports = {port_of(store) for thread, store in in_flight.items() if thread.is_alive()}
    if ports:
        _shut_down_connections_to(ports)
        for thread in in_flight:
            thread.join(SHUTDOWN_SECONDS)


def _shut_down_connections_to(ports: Container[int | None]) -> None:
    with suppress(FileNotFoundError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.getpeername()[1] in ports:
                    connection.shutdown(socket.SHUT_RDWR)


def get_all(
    group: dist.ProcessGroup, store: Store, keys: list[str], purpose: str, check: Callable[[], None]
) -> list[str]:
    """The values of the keys, of which each rank sets one. Waits for the ranks, at most for the group's timeout.

    Raises:
        RanksMissing: some ranks have not set their keys; names them.
        RuntimeError: the store gives no answer; or what ``check`` raises, which is called while waiting.
    """
    requests, timeout = StoreRequests(store), collective_timeout(group)
    if missing := wait_for_ranks(group, requests, keys, timeout, check):
        raise RanksMissing(purpose, missing, timeout)
    return requests.require(lambda store: _values(store, keys), timeout)


def _values(store: Store, keys: list[str]) -> list[str]:
    """The values of keys that are set."""
    values = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]  # type: ignore[attr-defined]
    return [each.decode() for each in values]


def text_at(store: Store, key: str) -> str | None:
    """The text under a key; None if there is none yet."""
    return store.get(key).decode() if store.check([key]) else None


def _leave(store: Store, attempt: str, n_ranks: int) -> None:
    """Note that this rank has read the outcome of an attempt; the last rank deletes the keys."""
    delete_on_last(store, f"{attempt}/left", n_ranks, [f"{attempt}/{each}" for each in (*range(n_ranks), "outcome")])


def delete_keys(store: Store, keys: Iterable[str]) -> None:
    """Delete keys, set or not. They stay in a store that cannot delete keys."""
    if can_delete_keys(store):
        for key in keys:
            store.delete_key(key)


def delete_on_last(store: Store, counter: str, n_ranks: int, keys: Iterable[str]) -> None:
    """Note that this rank needs the keys no longer; the last of ``n_ranks`` ranks deletes them, and the counter."""
    if can_delete_keys(store) and store.add(counter, 1) == n_ranks:
        delete_keys(store, [*keys, counter])


def wait_for_ranks(
    group: dist.ProcessGroup, requests: StoreRequests, keys: list[str], timeout: timedelta, check: Callable[[], None]
) -> list[int]:
    """Wait until every rank has set its key; return the missing ranks by their numbers in the default group."""
    pending = keys  # `Store.wait` would print warnings
    begin = checked = time.monotonic()
    pause = 0.005
    while pending:
        if requests.ask(methodcaller("check", pending[:KEYS_AT_ONCE])):
            pending = pending[KEYS_AT_ONCE:]
            continue
        now = time.monotonic()
        if now - begin >= timeout.total_seconds():
            break
        if now - checked >= POLL_SECONDS:
            checked = now
            check()
        time.sleep(min(pause, begin + timeout.total_seconds() - now))
        pause = min(1.5 * pause, POLL_SECONDS)
    missing = []
    for rank, key in zip(dist.get_process_group_ranks(group), keys, strict=True):
        is_set = key not in pending or requests.ask(methodcaller("check", [key]))
        if is_set is None:
            raise RuntimeError(NO_STORE.format(seconds=timeout.total_seconds()))
        if not is_set:
            missing.append(rank)
    return missing


def named_barrier(
    group: dist.ProcessGroup, purpose: str, timeout: timedelta | None = None, check: Callable[[], None] = lambda: None
) -> None:
    """Barrier: return once every rank has made the matching call; see `store_all_gather`."""
    store_all_gather(group, purpose, "here", timeout, check)
