"""`gradwire.checkpoint`: a training is saved by all ranks or by none, and resumes where it was."""

import json
import pickle
import random
from collections import deque
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import gradwire
from gradwire import checkpoint
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.sharded import sharded
from tests.support.training import HOOKS, WRAPPERS, error_of, gradients, message_of, register, train_steps, wrapped


class Training:
    """A model with its optimizer, scheduler and hook, trained on batches from this process's random numbers."""

    def __init__(self, hook=None, wrapper="gradwire", seed=0):
        self.ddp = wrapped(wrapper, seed=seed)
        self.state = register(self.ddp, hook) if hook else None
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.objects = {"scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, 2)}

    def steps(self, number):
        for _ in range(number):
            self.optimizer.zero_grad()
            self.ddp(torch.randn(4, 11) * (1 + random.random())).backward()
            self.optimizer.step()
            self.objects["scheduler"].step()
        return {
            "gradients": gradients(self.ddp),
            "parameters": dict(self.ddp.module.state_dict()),
            "rate": self.optimizer.param_groups[0]["lr"],
        }

    def save(self, folder, step, **options):
        return checkpoint.save(folder, self.ddp, self.optimizer, step, objects=self.objects, **options)

    def load(self, folder):
        return checkpoint.load(folder, self.ddp, self.optimizer, objects=self.objects)


def start(seed=0):
    torch.manual_seed(100 * seed + dist.get_rank())
    random.seed(100 * seed + dist.get_rank())


# Their memory is the same on a resumed rank.
EXACT = [None, "fp16", "scaled_fp16"]
MERGED = ["powersgd", "int4", "topk"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", EXACT)
@on_ranks(2)  # the sums of three ranks depend on the buckets, which start anew
def test_resumed_training_is_bitwise_equal_to_the_uninterrupted_one(hook, wrapper, tmp_path):
    start()
    training = Training(hook, wrapper)
    training.steps(4)
    training.save(tmp_path, 4)
    expected = training.steps(3)
    resumed = Training(hook, wrapper, seed=1)
    start(seed=2)
    assert resumed.load(tmp_path) == 4
    assert_same_bits(resumed.steps(3), expected)


@pytest.mark.parametrize("hook", MERGED)
@on_ranks(2)  # a third of a sum is rounded
def test_state_of_the_hook_is_saved_and_resumed(hook, tmp_path):
    start()
    training = Training(hook)
    training.steps(7)
    training.save(tmp_path, 7)
    saved = training.state.state_dict()
    resumed = Training(hook, seed=1)
    assert resumed.load(tmp_path) == 7
    assert_same_bits(resumed.state.state_dict(), saved)
    assert_same_on_all_ranks(from_all_ranks(resumed.steps(2)))


def save_four_steps(folder):
    start()
    training = Training("int4")
    training.steps(4)
    training.save(folder, 4)
    return training.state.state_dict(), dict(training.ddp.module.state_dict())


def load_and_train(folder):
    start(seed=1)
    resumed = Training("int4", seed=1)
    assert resumed.load(folder) == 4
    loaded = resumed.state.state_dict(), {name: each.clone() for name, each in resumed.ddp.module.state_dict().items()}
    return loaded, resumed.steps(2)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3)], ids=str)
def test_training_resumes_on_another_number_of_ranks(worlds, tmp_path, sizes):
    saved, *_ = worlds(sizes[0]).run(save_four_steps, folder=tmp_path)
    results = worlds(sizes[1]).run(load_and_train, folder=tmp_path)
    assert_same_on_all_ranks([steps for _, steps in results])
    for loaded, _ in results:
        assert loaded[0]["iter"] == saved[0]["iter"]
        for name, error in saved[0]["errors"].items():
            torch.testing.assert_close(loaded[0]["errors"][name], error, rtol=1e-6, atol=1e-7)
        assert_same_bits(loaded[1], saved[1])


@on_ranks(2)
def test_folder_without_a_checkpoint_changes_nothing(tmp_path):
    training = Training("int4")
    before = {name: each.clone() for name, each in training.ddp.module.state_dict().items()}
    assert training.load(tmp_path / "absent") is None
    assert training.load(tmp_path) is None
    assert_same_bits(dict(training.ddp.module.state_dict()), before)


@on_ranks(2)
def test_newest_checkpoints_are_kept(tmp_path):
    training = Training("int4")
    for step in range(3, 15, 3):
        training.steps(3)
        assert training.save(tmp_path, step) == tmp_path / f"step-{step}"
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12", "step-9"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-12"
    assert Training("int4").load(tmp_path) == 12
    training.save(tmp_path, 12, keep=1)  # again
    training.save(tmp_path, 4, keep=1)  # older than what is there, which stays
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12", "step-4"]


@pytest.mark.parametrize("part", ["tensors", "file", "rename"])
@on_ranks(2)
def test_error_while_saving_raises_on_every_rank_and_keeps_the_earlier_checkpoint(part, tmp_path):
    training = Training("int4")
    training.steps(3)
    training.save(tmp_path, 3, keep=1)
    expected = dict(training.ddp.module.state_dict())
    expected = {name: each.clone() for name, each in expected.items()}
    training.steps(1)

    def fail(*arguments, **options):
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            if part == "tensors":
                patch.setattr(dcp.FileSystemWriter, "write_data", fail)
            else:
                patch.setattr(checkpoint, {"file": "_write", "rename": "_replace"}[part], fail)
        message = message_of(training.save, tmp_path, 4, keep=1)
    assert "no space left" in message
    dist.barrier()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-3"
    resumed = Training("int4", seed=1)
    assert resumed.load(tmp_path) == 3
    assert_same_bits(dict(resumed.ddp.module.state_dict()), expected)
    training.save(tmp_path, 4, keep=1)  # over what the failed one has left
    assert checkpoint.latest(tmp_path) == tmp_path / "step-4"


@on_ranks(2)
def test_rank_that_does_not_save_is_named(tmp_path):
    training = Training("int4")
    training.steps(3)
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "TIMEOUT", timedelta(seconds=1))
            message = message_of(training.save, tmp_path, 3)
        assert "gradwire.checkpoint.save() is a collective call: ranks [1] have not made it" in message
        assert checkpoint.latest(tmp_path) is None
    dist.barrier()
    training.save(tmp_path, 3)


@on_ranks(2)
def test_unequal_steps_raise_on_every_rank(tmp_path):
    message = message_of(Training("int4").save, tmp_path, dist.get_rank())
    assert message == "step is 0 on rank 0, 1 on rank 1; expected the same on every rank."


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": -1}, "step is -1; expected a whole number of steps"),
        ({"step": 1, "keep": 0}, "keep is 0; expected a whole number of checkpoints"),
    ],
    ids=["step", "keep"],
)
@on_ranks(2)
def test_invalid_argument_on_one_rank_raises_on_every_rank(options, text, tmp_path):
    given = options if dist.get_rank() == 1 else {"step": 1}
    message = message_of(Training("int4").save, tmp_path, **given)
    assert text in message
    assert checkpoint.latest(tmp_path) is None


def other_hook(folder):
    return Training("powersgd")


def change_about(folder, **changes):
    """Change what rank 0 has written about a checkpoint, before any rank reads it."""
    if dist.get_rank() == 0:
        path = folder / "step-3" / checkpoint.ABOUT
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    dist.barrier()
    return Training("int4")


def newer_format(folder):
    return change_about(folder, format=checkpoint.FORMAT + 1, gradwire="9.0")


def format_that_is_no_number(folder):
    return change_about(folder, format=None)


def other_object(folder):
    training = Training("int4")
    training.objects["scaler"] = torch.amp.GradScaler("cpu")
    return training


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def pickle_with_code(folder):
    data = pickle.dumps(Payload(folder / "executed"))
    (folder / "step-3" / checkpoint.FILE).write_bytes(data)
    return change_about(folder, blake2b=checkpoint._digest(data))


REFUSED = {
    other_hook: "step-3 has a QuantizationState, this model a PowerSGDState. Register the hook of the saved run",
    newer_format: "step-3 has format 2, of gradwire 9.0; this is gradwire",
    format_that_is_no_number: "step-3 is damaged: TypeError",
    other_object: "step-3 has no state of scaler. Leave it out of objects",
    pickle_with_code: "Weights only load failed",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
@on_ranks(2)
def test_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(change, tmp_path):
    training = Training("int4")
    training.steps(3)
    training.save(tmp_path, 3)
    other = change(tmp_path)
    before = {name: each.clone() for name, each in other.ddp.module.state_dict().items()}
    message = message_of(other.load, tmp_path)
    assert message is not None and REFUSED[change] in message
    assert_same_bits(dict(other.ddp.module.state_dict()), before)
    assert other.state.iter == 0
    assert not (tmp_path / "executed").exists()


@on_ranks(1)
def test_no_change_of_a_byte_and_no_truncation_goes_unnoticed(tmp_path):
    training = Training("int4")
    training.steps(3)
    folder = training.save(tmp_path, 3)
    generator = random.Random(0)
    for name in (checkpoint.FILE, checkpoint.ABOUT):
        path = folder / name
        whole = path.read_bytes()
        for _ in range(100):
            data = bytearray(whole)
            position = generator.randrange(len(data))
            if generator.random() < 0.3:
                del data[position:]
            else:
                data[position] ^= 1 << generator.randrange(8)
            path.write_bytes(data)
            error = error_of(training.load, tmp_path)
            is_about_the_version = name == checkpoint.ABOUT and error is None
            assert is_about_the_version or error[0] == "ValueError", data
        path.write_bytes(whole)


@pytest.mark.parametrize("place", ["fsdp", pytest.param("hsdp", marks=pytest.mark.slow)])
@on_ranks(4)
def test_memory_of_a_sharded_model_is_saved_and_resumed(place, tmp_path):
    def attached():
        model = sharded(place)
        state = HOOKS["int4"](None)[0] if place == "hsdp" else None
        options = gradwire.sharded.ReduceScatterOptions(wire="int4")
        return model, gradwire.attach(model, state, within=options), torch.optim.AdamW(model.parameters(), lr=0.01)

    def steps(model, optimizer, number):
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.randn(3, 9)).square().mean().backward()
            optimizer.step()

    start()
    model, attachment, optimizer = attached()
    steps(model, optimizer, 4)
    assert "Pass hook=" in message_of(checkpoint.save, tmp_path, model, optimizer, 4)
    checkpoint.save(tmp_path, model, optimizer, 4, hook=attachment)
    saved = attachment.state_dict()
    other, resumed, other_optimizer = attached()
    assert checkpoint.load(tmp_path, other, other_optimizer, hook=resumed) == 4
    local = [
        {name: each.to_local() for name, each in (model.state_dict() | entry.get("within", {})).items()}
        for model, entry in ((model, saved), (other, resumed.state_dict()))
    ]
    assert_same_bits(*local)


@on_ranks(4)
def test_attachment_without_memory_is_saved_and_resumed(tmp_path):
    def attached():
        model = sharded("fsdp")
        return model, gradwire.attach(model, within="bf16"), torch.optim.SGD(model.parameters(), lr=0.01)

    start()
    model, attachment, optimizer = attached()
    assert attachment.state_dict() == {}
    checkpoint.save(tmp_path, model, optimizer, 4, hook=attachment)
    other, resumed, other_optimizer = attached()
    assert checkpoint.load(tmp_path, other, other_optimizer, hook=resumed) == 4


@on_ranks(2)
def test_buffers_are_those_of_rank_0(tmp_path):
    """Every rank updates the running statistics of its batches; the next forward broadcasts those of rank 0."""
    ddp = wrapped(model="conv")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train_steps(ddp, 3)
    checkpoint.save(tmp_path, ddp, optimizer, 3)
    buffers = {name: each.clone() for name, each in ddp.module.named_buffers()}
    expected = from_all_ranks(buffers)[0]
    other = wrapped(model="conv", seed=1)
    checkpoint.load(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert_same_bits(dict(other.module.named_buffers()), expected)


@on_ranks(2)
def test_parameter_without_a_gradient_has_no_moments_after_a_load(tmp_path):
    def new():
        ddp = wrapped(find_unused_parameters=True)
        ddp.module.spare = ddp.module.layers[6]
        ddp.module.layers = ddp.module.layers[:6]
        return ddp, torch.optim.Adam(ddp.parameters())

    ddp, optimizer = new()
    checkpoint.save(tmp_path, ddp, optimizer, 0)
    assert not optimizer.state, "saving changes no optimizer"
    for _ in range(3):
        train_steps(ddp, 1)
        optimizer.step()
    checkpoint.save(tmp_path, ddp, optimizer, 3)
    resumed, other = new()
    train_steps(resumed, 1)  # gradients of a warm-up are dropped
    assert checkpoint.load(tmp_path, resumed, other) == 3
    assert [int(each["step"]) for each in other.state.values()] == [3] * 6
    assert_same_bits(
        *(
            {i: each.state[p] for i, p in enumerate(m.parameters()) if p in each.state}
            for m, each in ((ddp, optimizer), (resumed, other))
        )
    )


@on_ranks(2)
def test_models_of_several_groups_and_states_that_no_load_accepts_are_refused(tmp_path):
    groups = [dist.new_group([rank]) for rank in range(2)]
    ddp = wrapped(group=groups[dist.get_rank()])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    assert "averages over 1 of 2 ranks" in message_of(checkpoint.save, tmp_path, ddp, optimizer, 1)
    training = Training("int4")
    training.objects["scheduler"] = mock.Mock(state_dict=lambda: {"deque": deque([1])})
    assert "could not be loaded again" in message_of(training.save, tmp_path, 1)
    assert checkpoint.latest(tmp_path) is None
