"""Checkpoints of every released version load, and training continues from them."""

from pathlib import Path

import pytest
import torch

from gradwire.testing._laws import errors_of
from tests.support.ranks import on_ranks
from tests.support.recipe import load
from tests.support.states import FEEDBACK, START, STATES, Training, make
from tests.support.training import build, gradients

FOLDER = Path(__file__).parents[2] / "checkpoints"  # written by tests/support/keep_checkpoints.py
VERSIONS = sorted(folder.name for folder in FOLDER.iterdir())
versions = pytest.mark.parametrize("version", VERSIONS)


@versions
@pytest.mark.parametrize("kind", STATES)
@on_ranks(1, 2)
def test_state_of_a_released_version_resumes(kind, version):
    saved = torch.load(FOLDER / version / f"{kind}.pt", weights_only=True)
    training = Training(kind, load=saved)
    if kind in FEEDBACK:
        assert any(error.any() for error in errors_of(saved).values())
        found = errors_of(training.state.state_dict())
        for name, error in errors_of(saved).items():
            torch.testing.assert_close(found[name], error, rtol=1e-6, atol=0)
    training.run(2)
    assert all(gradient.isfinite().all() for gradient in gradients(training.ddp).values())
    assert training.state.iter == (2 if kind == "scaled_fp16" else START + 4)  # its checkpoints have no step count


@versions
@on_ranks(2)
def test_training_of_a_released_version_resumes(version):
    module = build("mlp", seed=1)
    training = Training(make("int4", module), model=module)
    optimizer = torch.optim.AdamW(training.ddp.parameters())
    assert load(FOLDER / version / "training", training.ddp, optimizer, hook=training.state) == START + 2
    training.run(2)
    assert training.state.iter == START + 4
    assert {int(state["step"]) for state in optimizer.state.values()} == {START + 2}
