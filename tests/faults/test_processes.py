"""A rank that is killed, interrupted or stopped, or raises: its peers raise in time, or go on with the right bits."""

import signal
import time

import pytest

from tests.support.faulty_run import PLACES, PRECISION, check_applied_steps, check_end, resume_process, started
from tests.support.training import WRAPPERS

STEPS, AT, VICTIM = 9, 5, 1
SHORT_STOP_S = 2  # less than the timeout of the collectives
LONG_STOP_TIMEOUT_S = 8
OTHERS = pytest.mark.faults  # of `make faults`
CODES = {"exception": 1, "SIGKILL": -signal.SIGKILL, "SIGINT": -signal.SIGINT}
QUICK = [("SIGKILL", "backward", "int4", "gradwire"), ("SIGINT", "loss", "fp16", "gradwire")]


def options(hook, wrapper, how, place, **others):
    fault = {"how": how, "place": place, "victim": VICTIM, "at": AT}
    return {"hook": hook, "wrapper": wrapper, "steps": STEPS, "timeout_s": 60} | fault | others


@pytest.mark.parametrize(("how", "place", "hook", "wrapper"), QUICK)
def test_rank_that_ends_is_named_by_its_peer(tmp_path, how, place, hook, wrapper):
    check_end_after_fault(tmp_path, 2, how, place, hook, wrapper)


@OTHERS
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", PRECISION)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", CODES)
def test_rank_that_ends_lets_all_others_raise(tmp_path, how, place, hook, wrapper):
    check_end_after_fault(tmp_path, 3, how, place, hook, wrapper)


def check_end_after_fault(folder, size, how, place, hook, wrapper):
    """Rank `VICTIM` ends with Python's exit code, and its peers with an error that tells why."""
    with started(size, folder, **options(hook, wrapper, how, place)) as ranks:
        codes = [rank.end() for rank in ranks]
    errors = [rank.errors() for rank in ranks]
    peers = [rank for rank in range(size) if rank != VICTIM]
    if place == "state_dict" and hook in ("none", "fp16"):  # there is none
        assert codes == [0] * size, errors
    else:
        assert codes == [CODES[how] if rank == VICTIM else 1 for rank in range(size)], errors
        for rank in peers:
            assert "RuntimeError" in errors[rank]
            if how != "SIGKILL" and wrapper == "gradwire":
                assert ("Fault" if how == "exception" else "KeyboardInterrupt") in errors[rank]
    check_applied_steps(ranks, hook)


@pytest.mark.parametrize(
    ("place", "hook", "wrapper"),
    [
        ("backward", "powersgd", "gradwire"),
        *(
            pytest.param(place, hook, wrapper, marks=OTHERS)
            for place in PLACES[:-1]
            for hook, wrapper in (("none", "gradwire"), ("int4", "gradwire"), ("int4", "pytorch"), ("fp16", "pytorch"))
        ),
    ],
)
def test_rank_that_stops_for_less_than_the_timeout_changes_nothing(tmp_path, place, hook, wrapper):
    with started(2, tmp_path, **options(hook, wrapper, "SIGSTOP", place)) as ranks:
        ranks[VICTIM].wait_until_stopped()
        time.sleep(SHORT_STOP_S)
        resume_process(ranks[VICTIM])
        check_end(ranks, hook, [0, 0])
    assert [len(rank.steps()) for rank in ranks] == [STEPS, STEPS]


@OTHERS
@pytest.mark.parametrize("hook", ["none", "int4", "powersgd", "fp16"])
@pytest.mark.parametrize("place", ["forward", "backward", "after an exchange"])
def test_rank_that_stops_for_longer_than_the_timeout_raises_like_its_peers(tmp_path, place, hook):
    with started(3, tmp_path, **options(hook, "gradwire", "SIGSTOP", place, timeout_s=LONG_STOP_TIMEOUT_S)) as ranks:
        ranks[VICTIM].wait_until_stopped()
        for rank in (0, 2):
            ranks[rank].end()
        resume_process(ranks[VICTIM])
        check_end(ranks, hook, [1, 1, 1])


@OTHERS
@pytest.mark.parametrize("hook", ["none", "int4", "powersgd", "scaled_fp16"])
@pytest.mark.parametrize("place", ["forward", "backward", "after an exchange"])
def test_ranks_resume_after_one_has_stopped_for_longer_than_the_timeout(tmp_path, place, hook):
    stopping = options(hook, "gradwire", "SIGSTOP", place, timeout_s=LONG_STOP_TIMEOUT_S, resumes=True)
    with started(3, tmp_path, **stopping) as ranks:
        ranks[VICTIM].wait_until_stopped()
        for rank in (0, 2):
            while not any("raised" in fact for fact in ranks[rank].facts()) and ranks[rank].process.poll() is None:
                time.sleep(0.05)
        resume_process(ranks[VICTIM])
        check_end(ranks, hook, [0, 0, 0])
    assert all(STEPS - 1 in rank.steps() for rank in ranks)
