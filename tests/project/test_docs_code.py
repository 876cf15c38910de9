"""The Python code of the documentation runs, in the order of its page."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire

DOCS = Path(__file__).parents[2] / "docs"


def new_model():
    """With the names and shapes that options on the pages refer to."""
    torch.manual_seed(0)
    block = torch.nn.ModuleDict({"qkv": torch.nn.Linear(32, 96), "out": torch.nn.Linear(96, 32)})
    parts = {"embedding": torch.nn.Embedding(10, 32), "block": block, "head": torch.nn.Linear(64, 64)}
    return torch.nn.ModuleDict(parts)


def train(ddp, optimizer, steps):
    """A loss of every parameter, as the parts of the model do not fit each other."""
    ddp.module.forward = lambda scale: scale * sum(p.square().sum() for p in ddp.module.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.tensor(float(1 + step))).backward()
        optimizer.step()


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def takes_hook(block):
    return re.search(r"register_comm_hook\(|gradwire\.attach\(\s*model,", block) is not None


def run(block, names):
    """Run a block; a block that takes a hook gets a new model, wrapped unless the block wraps it."""
    if takes_hook(block):
        wraps = "DistributedDataParallel(model)" in block
        names["model"] = new_model() if wraps else gradwire.DistributedDataParallel(new_model())
    exec(block, names)


@pytest.mark.parametrize(
    ("page", "blocks"),
    [
        ("getting-started.md", 1),
        ("choosing-a-hook.md", 1),
        ("16-bit.md", 4),
        ("powersgd.md", 4),
        ("quantization.md", 3),
        ("writing-a-hook.md", 9),
    ],
)
def test_code_on_a_page_runs_and_its_hooks_train(world_of_one, monkeypatch, page, blocks):
    monkeypatch.syspath_prepend(DOCS.parent / "examples")
    found = [block for block in blocks_of(page) if "start_processes(" not in block]
    assert len(found) == blocks
    names = {"torch": torch, "dist": dist, "gradwire": gradwire}
    for block in found:
        run(block, names)
        if takes_hook(block):
            train(names["model"], torch.optim.SGD(names["model"].parameters(), lr=0.01), 3)
            assert all(parameter.isfinite().all() for parameter in names["model"].parameters())
    for test in [function for name, function in names.items() if name.startswith("test_")]:
        test()


def test_notebook_cell_trains_after_a_cell_that_used_several_threads():
    """Python reads both from its standard input: as in a notebook, functions are in ``__main__`` and in no file."""
    (cell,) = [block for block in blocks_of("getting-started.md") if "start_processes(" in block]
    earlier = "import torch\ntorch.ones(999, 999) @ torch.ones(999, 999)\n"
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-"], env=environment, start_new_session=True, **pipes) as notebook:
        try:
            printed, _ = notebook.communicate(earlier + cell, timeout=120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(notebook.pid, signal.SIGKILL)  # ranks that hang
    assert printed.startswith("2 ranks: loss ")


@pytest.mark.parametrize("attached", ['"int4"', '"powersgd-r4", start_powerSGD_iter=2'])
def test_checkpoint_saved_as_documented_resumes_as_documented(world_of_one, tmp_path, attached):
    recipe, *blocks = blocks_of("checkpointing.md")
    load_all, save_all, save, resume = (block.replace('"int4"', attached) for block in blocks)
    names = {"gradwire": gradwire, "path": tmp_path / "saved.pt", "folder": tmp_path / "saved"}
    exec(recipe, names)

    def begin():
        names["model"] = gradwire.DistributedDataParallel(new_model())
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.01, momentum=0.9)

    begin()
    exec(load_all, names)
    assert names["step"] == 0  # nothing is saved yet
    train(names["model"], names["optimizer"], 4)
    names["step"] = 4
    exec(save, names)
    exec(save_all, names)
    saved_model, saved_hook = dict(names["model"].module.state_dict()), names["attachment"].state_dict()
    for block in (resume, load_all):
        begin()
        exec(block, names)
        assert all(torch.equal(each, saved_model[key]) for key, each in names["model"].module.state_dict().items())
        resumed = names["attachment"].state_dict()
        assert resumed["iter"] == saved_hook["iter"] == 4
        assert all(torch.equal(error, saved_hook["errors"][key]) for key, error in resumed["errors"].items())
        assert any(error.abs().max() > 0 for error in resumed["errors"].values())


def test_loop_on_the_fault_handling_page_trains_on_after_an_error(world_of_one):
    block, comparing = blocks_of("fault-handling.md")
    ddp = gradwire.DistributedDataParallel(torch.nn.Linear(4, 4))
    failures = iter([False, True, False])

    def model(batch):
        if next(failures):
            raise RuntimeError("on purpose")
        return ddp(batch).sum()

    model.resynchronize = ddp.resynchronize
    before = ddp.module.weight.detach().clone()
    exec(
        block,
        {"model": model, "optimizer": torch.optim.SGD(ddp.parameters(), lr=1.0), "loader": [torch.ones(1, 4)] * 3},
    )
    assert torch.equal(ddp.module.weight, before - 2)
    exec(comparing, {"gradwire": gradwire, "module": torch.nn.Linear(4, 4)})
