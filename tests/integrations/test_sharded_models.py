"""FSDP2 and HSDP under trainers: training equals a plain loop with `gradwire.attach`; checkpoints keep its errors."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import gradwire.sharded
from gradwire.integrations import attach
from gradwire.integrations._checkpoint import load_shards
from gradwire.sharded import ReduceScatterOptions
from tests.integrations import regression_task as task


def compression(place):
    """Arguments of `attach`, made anew: int4 with error feedback, on the reduce-scatter or between replicas."""
    if place == "fsdp":
        return {"within": ReduceScatterOptions(wire="int4", block_size=32, error_dtype=torch.float32)}
    return {"state": "int4", "block_size": 32}


def shard(model, place):
    sizes = {"shard": 2} if place == "fsdp" else {"replicate": 2, "shard": 1}
    return fully_shard(model, mesh=init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


def whole_weights(model):
    return {name[name.index("net.") :]: p.detach().full_tensor() for name, p in model.named_parameters()}


def plain_run(place, compresses):
    """The weights after training without a trainer, in the default group."""
    model = shard(task.new_net(), place)
    if compresses:
        gradwire.attach(model, **compression(place))
    optimizer = task.optimizer_of(model)
    for _ in range(task.EPOCHS):
        for batch in task.rank_loader(dist.get_rank()):
            optimizer.zero_grad()
            task.loss_of(model, batch).backward()
            optimizer.step()
    return whole_weights(model)


def memory_of(attachment):
    """This rank's shards of the errors, and the step count. A collective call."""
    memory = {}
    for entry, values in attachment.state_dict().items():
        shards = values if isinstance(values, dict) else {}
        memory |= {f"{entry}.{name}": each.to_local().clone() for name, each in shards.items()}
        memory |= {} if isinstance(values, dict) else {entry: torch.tensor(values)}
    return memory


class UnderLightning:
    def __init__(self, place, folder, epochs=task.EPOCHS):
        from lightning import LightningModule, Trainer

        from gradwire.integrations.lightning import GradwireModelParallelStrategy

        class Regression(LightningModule):
            def __init__(self):
                super().__init__()
                self.net = task.Net().net

            def configure_model(self):
                shard(self, place)

            def training_step(self, batch, _):
                inputs, targets = batch
                return nn.functional.mse_loss(self(inputs), targets)

            def forward(self, inputs):
                return self.net(inputs)

            def configure_optimizers(self):
                return task.optimizer_of(self)

        self.strategy = GradwireModelParallelStrategy(
            **compression(place), data_parallel_size=2, tensor_parallel_size=1
        )
        self.trainer = Trainer(
            accelerator="cpu", devices=2, strategy=self.strategy, max_epochs=epochs, use_distributed_sampler=False,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        self.model, self.path = task.new_net(Regression), f"{folder}/saved"

    def train(self, resumes=False):
        path = self.path if resumes else None
        self.trainer.fit(self.model, task.rank_loader(int(os.environ["RANK"])), ckpt_path=path)

    def save(self):
        self.trainer.save_checkpoint(self.path)

    @property
    def attachment(self):
        return self.strategy.attachment


class UnderFabric:
    def __init__(self, place, folder, epochs=task.EPOCHS):
        from lightning import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(lambda model, mesh: shard(model, place), 2, 1)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        self.model = self.fabric.setup(task.new_net())
        self.optimizer = self.fabric.setup_optimizers(task.optimizer_of(self.model))
        self.attachment = gradwire.attach(self.model.module, **compression(place))
        self.epochs, self.path = epochs, f"{folder}/saved"

    def train(self, resumes=False):
        if resumes:
            saved = self.attachment.state_dict()
            dcp.load(saved, checkpoint_id=self.path)
            self.attachment.load_state_dict(saved)
            return
        for _ in range(self.epochs):
            for batch in task.rank_loader(self.fabric.global_rank):
                self.optimizer.zero_grad()
                self.fabric.backward(task.loss_of(self.model, batch))
                self.optimizer.step()

    def save(self):
        dcp.save(self.attachment.state_dict(), checkpoint_id=self.path)


class UnderAccelerate:
    def __init__(self, place, folder, epochs=task.EPOCHS):
        from accelerate import Accelerator

        from gradwire.integrations import accelerate

        self.accelerator = Accelerator(cpu=True)
        with_fsdp2(self.accelerator)
        model = task.new_net()
        self.model, self.optimizer = self.accelerator.prepare(model, task.optimizer_of(model))
        self.attachment = accelerate.attach(self.accelerator, self.model, **compression(place))
        self.epochs, self.path = epochs, f"{folder}/saved"

    def train(self, resumes=False):
        if resumes:
            self.accelerator.load_state(self.path)
            return
        for _ in range(self.epochs):
            for batch in task.rank_loader(self.accelerator.process_index):
                self.optimizer.zero_grad()
                self.accelerator.backward(task.loss_of(self.model, batch))
                self.optimizer.step()

    def save(self):
        self.accelerator.save_state(self.path)


class UnderTransformers:
    def __init__(self, place, folder, epochs=task.EPOCHS):
        from transformers import Trainer, TrainingArguments

        from gradwire.integrations.transformers import GradwireCallback
        from tests.integrations.test_transformers import Items, Regression

        class Sharded(Trainer):
            def create_accelerator_and_postprocess(self):
                super().create_accelerator_and_postprocess()
                with_fsdp2(self.accelerator)
                self.is_fsdp_enabled = True

            def create_optimizer(self, model=None):
                self.optimizer = task.optimizer_of(self.model)
                return self.optimizer

        arguments = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=task.BATCH_SIZE,
            train_sampling_strategy="sequential", lr_scheduler_type="constant", max_grad_norm=0,
            save_strategy="epoch", logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
            ddp_backend="gloo",
        )  # fmt: skip
        self.trainer = Sharded(task.new_net(Regression), arguments, train_dataset=Items())
        self.callback = GradwireCallback(self.trainer, **compression(place))
        self.path = f"{folder}/checkpoint-{task.STEPS_PER_EPOCH}"

    def train(self, resumes=False):
        self.trainer.train(resume_from_checkpoint=self.path if resumes else None)

    def save(self):
        """Trainer has saved a checkpoint after the epoch."""

    @property
    def model(self):
        return self.trainer.model

    @property
    def attachment(self):
        return self.callback.attachment


def with_fsdp2(accelerator):
    """Accelerate uses FSDP on accelerators only; the code is the same on a CPU."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


RUNS = {
    "lightning": UnderLightning,
    "fabric": UnderFabric,
    "accelerate": UnderAccelerate,
    "transformers": UnderTransformers,
}


def train_and_resume(trainer, place, folder):
    """Weights of an exact run, the plain run and the run under the trainer; memory as saved and as loaded."""
    task.launched_by_torchrun()
    whole = RUNS[trainer](place, folder)
    whole.train()
    weights = whole_weights(whole.model)
    half = RUNS[trainer](place, folder, epochs=1)
    half.train()
    half.save()
    saved = memory_of(half.attachment)
    resumed = RUNS[trainer](place, folder, epochs=1)
    resumed.train(resumes=True)  # no step is left
    loaded = memory_of(resumed.attachment)
    return plain_run(place, False), plain_run(place, True), weights, saved, loaded


@pytest.mark.parametrize(
    ("trainer", "place"),
    [
        ("lightning", "fsdp"),
        ("lightning", "hsdp"),
        ("fabric", "fsdp"),
        ("accelerate", "fsdp"),
        ("transformers", "fsdp"),
    ],
)
def test_sharded_training_equals_a_plain_loop_and_keeps_its_errors(run_on_two_ranks, tmp_path, trainer, place):
    package = "lightning" if trainer == "fabric" else trainer
    pytest.importorskip(package, reason=f"needs the extra '{package}': make test-integrations")
    for runs in run_on_two_ranks(train_and_resume, trainer=trainer, place=place, folder=str(tmp_path)):
        exact, plain, trained, saved, loaded = runs
        assert task.distance(trained, plain) == 0
        assert 1e-4 < task.distance(trained, exact) < 0.1
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert any(each.is_floating_point() and each.abs().max() > 0 for each in saved.values())


def test_checkpoint_without_the_memory_of_a_sharded_model_warns(tmp_path):
    with pytest.warns(UserWarning, match="holds no state of a communication hook"):
        load_shards(gradwire.sharded.Attachment(None, ""), tmp_path)


def test_lightning_checkpoint_in_one_file_cannot_hold_sharded_errors():
    pytest.importorskip("lightning", reason="needs the extra 'lightning': make test-integrations")
    from gradwire.integrations.lightning import GradwireModelParallelStrategy

    with pytest.raises(ValueError, match="save_distributed_checkpoint is False, but the error memory is sharded"):
        GradwireModelParallelStrategy(save_distributed_checkpoint=False, **compression("fsdp"))
    with pytest.raises(ValueError, match="save_distributed_checkpoint is False, but the error memory is sharded"):
        GradwireModelParallelStrategy("int4", save_distributed_checkpoint=False)
    GradwireModelParallelStrategy(save_distributed_checkpoint=False, within="bf16")  # without errors


def test_fsdp1_is_refused(world_of_one):
    model = FullyShardedDataParallel(task.new_net(), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="FSDP1 takes a process group: process_group=gradwire"):
        attach(nn.Sequential(model), within="bf16")
