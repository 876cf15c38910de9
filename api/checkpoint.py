"""Checkpoints of a data-parallel training, with the state of its communication hook: `save` and `load`.

A checkpoint is a folder. The model and the optimizer are in the format of `torch.distributed.checkpoint`, all other
parts in one file of rank 0. A checkpoint becomes visible when it is complete.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from gradwire._version import __version__
from gradwire.comm.store_collectives import format_by_rank, store_all_gather
from gradwire.comm.torch_internals import default_group
from gradwire.compress._validation import check_whole_number
from gradwire.hooks._bucket import plain_name
from gradwire.integrations._checkpoint import collect_state
from gradwire.sharded import Attachment
from gradwire.sharded.attachment import is_attached

__all__ = ["latest", "load", "save"]


def __dir__() -> list[str]:
    return __all__


FORMAT = 1
FILE, ABOUT = "gradwire.pt", "gradwire.json"  # all but the model and the optimizer; format, version and checksum
REMEDY = "Delete the folder, to load the checkpoint before it."
TIMEOUT = timedelta(minutes=5)  # for a rank that has not come to `save` or `load`, or that still writes
_NAME = re.compile(r"step-(\d+)")
T = TypeVar("T")


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    *,
    hook: Attachment | None = None,
    objects: Mapping[str, Stateful] | None = None,
    keep: int = 2,
) -> Path:
    """Save a training between two steps: model, optimizer, the state of the hook, random numbers, and the step.

    A collective call: every rank of the default process group must make it. The checkpoint is written to a hidden
    folder, and renamed once it is complete: a crash leaves the earlier checkpoints. Every rank returns after that.

    Args:
        folder: folder of the checkpoints of this training, on a file system that all ranks share.
        model: a DistributedDataParallel, PyTorch's or gradwire's, whose hook is registered, or an FSDP2 model.
        optimizer: the optimizer.
        step: number of steps so far, 0 or larger. Equal on all ranks.
        hook: the result of `gradwire.attach` for an FSDP2 model.
        objects: further objects with ``state_dict`` and ``load_state_dict``, by name, such as a learning-rate scheduler
            and a gradient scaler. Their state must be equal on all ranks, in tensors and plain values: that of rank 0
            is saved.
        keep: number of checkpoints to keep, this one included, 1 or more. Older ones are deleted.

    Returns:
        The folder of this checkpoint, ``folder/step-N``.

    Raises:
        ValueError: an argument is out of range, or the model has no hook that ``hook`` could be for, or needs ``hook``.
        RuntimeError: on every rank, if some ranks do not make this call within five minutes, have another ``step``, or
            cannot write. Nothing is deleted then.
    """
    folder, rank = Path(folder).absolute(), dist.get_rank()
    hidden, final = folder / f".step-{step}", folder / f"step-{step}"

    def begin() -> int:
        check_whole_number("step", step, "a whole number of steps, at least 0", 0)
        check_whole_number("keep", keep, "a whole number of checkpoints, at least 1", 1)
        _memories(model, hook)
        if rank == 0:
            for left in folder.glob(".step-*"):  # by a run that ended while it saved
                shutil.rmtree(left, ignore_errors=True)
            hidden.mkdir(parents=True)
        return step

    steps = _on_every_rank("gradwire.checkpoint.save()", begin)
    if len(set(steps)) > 1:
        raise RuntimeError(f"step is {format_by_rank(steps)}; expected the same on every rank.")
    states, attachment = _memories(model, hook)
    hooks = {name: collect_state(state) for name, state in states.items()}
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, _random_state())
    with _as_runtime_error("gradwire.checkpoint.save()"):
        # Where ranks differ, as in the buffers of BatchNorm, the values of rank 0 are saved.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        was_empty = not optimizer.state
        save_parts(_parts(model, optimizer, attachment), checkpoint_id=hidden, planner=planner)
        if was_empty:  # before its first step: `get_state_dict` has filled it with zeros
            optimizer.state.clear()

    def finish() -> None:
        if rank == 0:
            small = {
                "kinds": _kinds(states, attachment),
                "hooks": hooks,
                "objects": {name: each.state_dict() for name, each in (objects or {}).items()},
                "random": numbers,
            }
            _write(small, step, hidden)
            _replace(hidden, final)
            for old in [each for each in _complete(folder) if each < step][: 1 - keep or None]:
                _remove(folder / f"step-{old}")

    _on_every_rank("gradwire.checkpoint.save(), its end", finish)
    return final


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    hook: Attachment | None = None,
    objects: Mapping[str, Stateful] | None = None,
) -> int | None:
    """Continue a training from its latest checkpoint, on any number of ranks.

    A collective call: every rank of the default process group must make it, after the hook was registered. All ranks
    load the same checkpoint.

    Args:
        folder: folder of the checkpoints of `save`.
        model: the model, wrapped like the saved one. Modified.
        optimizer: the optimizer. Modified.
        hook: the result of `gradwire.attach` for an FSDP2 model. Modified.
        objects: objects by name, as for `save`. Modified.

    Returns:
        Number of steps of the checkpoint; None if the folder has none, or does not exist. Nothing is modified then.

    Raises:
        ValueError: the checkpoint is damaged, has a newer format, lacks one of the ``objects``, or is for another hook.
            Nothing is modified.
        RuntimeError: on every rank, if some ranks do not make this call within five minutes, or cannot read.
    """
    folder = Path(folder).absolute()
    found = partial(_first_ranks_latest, folder)
    name = _on_every_rank("gradwire.checkpoint.load()", found)[0]
    if name is None:
        return None
    place = folder / name
    small: dict[str, Any] = {}

    def read() -> None:
        small.update(_read(place, _kinds(*_memories(model, hook)), objects or {}))

    _on_every_rank("gradwire.checkpoint.load(), its file", read)
    states, attachment = _memories(model, hook)
    for each, state in states.items():
        state.load_state_dict(small["hooks"][each])
    optimizer.zero_grad()  # with gradients, `get_state_dict` does not prepare an optimizer that is new
    parts = _parts(model, optimizer, attachment)
    _leave_out_absent(parts["optimizer"]["state"], FileSystemReader(place).read_metadata().state_dict_metadata)
    with _as_runtime_error("gradwire.checkpoint.load()"):
        load_parts(parts, checkpoint_id=place)
    set_model_state_dict(model, parts["model"])
    partial_state = StateDictOptions(strict=False)  # without the parameters that `_leave_out_absent` has removed
    set_optimizer_state_dict(model, optimizer, parts["optimizer"], options=partial_state)
    if attachment is not None:
        attachment.load_state_dict(parts["hook"])
    for each, stateful in (objects or {}).items():
        stateful.load_state_dict(small["objects"][each])
    if dist.get_rank() < len(small["random"]):
        _set_random_state(small["random"][dist.get_rank()])
    return int(name.removeprefix("step-"))


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of `save` in a folder; None if there is none."""
    steps = _complete(Path(folder))
    return Path(folder) / f"step-{steps[-1]}" if steps else None


def _complete(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, ascending."""
    names = [_NAME.fullmatch(file.parent.name) for file in folder.glob(f"step-*/{ABOUT}")]
    return sorted(int(match[1]) for match in names if match)


def _first_ranks_latest(folder: Path) -> str | None:
    found = latest(folder) if dist.get_rank() == 0 else None
    return found.name if found else None


def _on_every_rank(call: str, action: Callable[[], T]) -> list[T]:
    """The results of ``action`` on all ranks, in JSON. A collective call. An error on one rank raises on every rank."""
    error, result = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    text = None if error is None else f"{type(error).__name__}: {error}"
    group = default_group()
    by_rank = [json.loads(each) for each in store_all_gather(group, call, json.dumps([result, text]), TIMEOUT)]
    if error is not None:
        raise error
    if failed := [(rank, text) for rank, (_, text) in enumerate(by_rank) if text is not None]:
        raise RuntimeError(f"{call} failed on rank {failed[0][0]}: {failed[0][1]}")
    return [result for result, _ in by_rank]


@contextmanager
def _as_runtime_error(call: str) -> Iterator[None]:
    """Raise PyTorch's error, which is no `Exception`, as RuntimeError. It is the same on all ranks."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(f"{call} failed: {error}") from error


# The parts of a checkpoint.


def _memories(model: nn.Module, hook: Attachment | None) -> tuple[dict[str, Any], Attachment | None]:
    """The states of the hooks in a model, by name of the wrapped module, and the attachment of a sharded model.

    Raises ValueError if ``hook`` is missing, or does not belong to the model.
    """
    wrappers = {name: each for name, each in model.named_modules() if isinstance(each, TorchDDP)}
    for each in wrappers.values():
        if each.process_group.size() != dist.get_world_size():
            raise ValueError(
                f"A DistributedDataParallel averages over {each.process_group.size()} of {dist.get_world_size()} "
                "ranks; expected all ranks, which save one model. Save the models of several groups in files of their "
                "own."
            )
    states = {plain_name(name): state for name, each in wrappers.items() for _, state in each._comm_hooks}
    states = {name: state for name, state in states.items() if isinstance(state, Stateful)}
    if wrappers:
        return states, None
    if hook is not None and hook._model is not model:
        raise ValueError("hook is not the result of gradwire.attach for this model.")
    if hook is None and is_attached(model):
        raise ValueError(
            "gradwire is attached to this model, and its memory belongs to the checkpoint. Pass hook=, the result of "
            "gradwire.attach."
        )
    return {}, hook


def _parts(model: nn.Module, optimizer: Optimizer, attachment: Attachment | None) -> dict[str, Any]:
    """The parts in the format of `torch.distributed.checkpoint`. A collective call."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments} | ({} if attachment is None else {"hook": attachment.state_dict()})


def _kinds(states: Mapping[str, Any], attachment: Attachment | None) -> dict[str, str]:
    """The types of the states, by name of the wrapped module."""
    attached = {} if attachment is None else {"": type(attachment.state or attachment).__name__}
    return {name: type(state).__name__ for name, state in states.items()} | attached


def _random_state() -> dict[str, Any]:
    """The states of the random number generators of this rank: PyTorch's, those of its device and Python's."""
    version, words, position = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), position], "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    version, words, position = state["python"]
    random.setstate((version, tuple(words), position))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _leave_out_absent(moments: dict[str, Any], saved: Iterable[str]) -> None:
    """Remove the parameters that had no gradient, and so no state of the optimizer, in the saved run."""
    for name in [each for each in moments if not any(key.startswith(f"optimizer.state.{each}.") for key in saved)]:
        del moments[name]


# The file of rank 0, and the folder.


def _write(content: dict[str, Any], step: int, folder: Path) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    saved = buffer.getvalue()
    try:
        torch.load(io.BytesIO(saved), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"The state of one of the objects, or of the hook, could not be loaded again: {error}. Give it a "
            "state_dict of tensors, numbers, strings, lists and dictionaries."
        ) from error
    about = {"format": FORMAT, "gradwire": __version__, "step": step, "blake2b": _digest(saved)}
    for name, data in ((FILE, saved), (ABOUT, json.dumps(about, indent=1).encode())):
        with (folder / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=32).hexdigest()


def _replace(hidden: Path, final: Path) -> None:
    """Rename a complete checkpoint, in place of one of the same step if there is one."""
    before = final.with_name(f".{final.name}-before")
    if final.exists():
        final.rename(before)
    hidden.rename(final)
    shutil.rmtree(before, ignore_errors=True)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint, hidden first: one that is deleted in part must not be loaded."""
    hidden = checkpoint.with_name(f".{checkpoint.name}-old")
    checkpoint.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _read(folder: Path, here: Mapping[str, str], objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """The content of the file of rank 0; raises ValueError unless it is for these kinds of states and objects."""
    try:
        about, data = json.loads((folder / ABOUT).read_text()), (folder / FILE).read_bytes()
        written_as, is_whole = int(about["format"]), about["blake2b"] == _digest(data)
    except OSError as error:
        raise RuntimeError(
            f"{folder} cannot be read on this rank: {error}. It must be on a file system that all ranks share."
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder} is damaged: {type(error).__name__}: {error}. {REMEDY}") from error
    if written_as > FORMAT:
        raise ValueError(
            f"{folder} has format {written_as}, of gradwire {about.get('gradwire')}; this is gradwire {__version__}, "
            f"which reads formats up to {FORMAT}. Install a newer version."
        )
    if not is_whole:
        raise ValueError(f"{folder} is damaged: {FILE} has another checksum than {ABOUT} says. {REMEDY}")
    content: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    if missing := sorted(objects.keys() - content["objects"].keys()):
        raise ValueError(f"{folder} has no state of {', '.join(missing)}. Leave it out of objects.")
    if (saved := content["kinds"]) != here:
        raise ValueError(
            f"{folder} has {_described(saved)}, this model {_described(here)}. Register the hook of the saved run "
            "before you load."
        )
    return content


def _described(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"a {kind}{f' of {name}' if name else ''}" for name, kind in kinds.items()) or "no state of a hook"
