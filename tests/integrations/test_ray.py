"""Hooks under Ray Train, on PyTorch's DistributedDataParallel and on gradwire's."""

import json
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="needs the extra 'ray': make test-integrations")

import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from gradwire.integrations import attach
from tests.integrations import regression_task as task

ROOT = Path(__file__).parents[2]


def train(hook, wrapper):
    """The weights after training the model that Ray prepares, on one worker."""
    if wrapper == "gradwire":
        model = task.WRAPPERS[wrapper](prepare_model(task.new_net(), parallel_strategy=None))
    else:
        model = prepare_model(task.new_net())
    arguments, options = task.arguments_for(hook)
    attach(model, *arguments, **options)
    optimizer = task.optimizer_of(model)
    for _ in range(task.EPOCHS):
        for batch in task.rank_loader(dist.get_rank()):
            optimizer.zero_grad()
            task.loss_of(model, batch).backward()
            optimizer.step()
    return task.weights(model)


def train_and_compare(options):
    """Save how far each run is from the one without Ray in the same processes."""
    pairs = [(hook, wrapper) for hook in task.HOOKS for wrapper in task.WRAPPERS]
    distances = {
        f"{hook}, {wrapper}": task.distance(train(hook, wrapper), task.plain_run(hook)) for hook, wrapper in pairs
    }
    (Path(options["folder"]) / f"{dist.get_rank()}.json").write_text(json.dumps(distances))


@pytest.fixture
def local_ray():
    """Ray on this machine, whose workers can import `tests`."""
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


def test_ray_run_equals_plain_run(local_ray, tmp_path):
    TorchTrainer(
        train_and_compare,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=task.WORLD_SIZE),
        run_config=RunConfig(storage_path=str(tmp_path / "ray")),
    ).fit()
    for rank in range(task.WORLD_SIZE):
        distances = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(distances) == 4 and set(distances.values()) == {0}, distances
