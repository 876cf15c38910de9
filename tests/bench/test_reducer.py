"""`gradwire bench reducer`: its arithmetic on made-up times, its models, its tables, and a run of the command."""

import torch

from gradwire.bench.models import MODELS


def test_models_have_their_numbers_of_parameters():
    sizes = {"tiny-layers": (200, 0.0), "transformer": (200, 3.2), "mlp": (10, 50.0)}
    for name, size in sizes.items():
        with torch.device("meta"):
            tensors = list(MODELS[name].build().parameters())
        assert (len(tensors), round(sum(tensor.numel() for tensor in tensors) / 1e6, 1)) == size
