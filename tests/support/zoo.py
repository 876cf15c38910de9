"""Small models, each with something that a reducer may get wrong, and the batches they are trained on.

``MODELS[name]`` is a class whose instances are equal on all ranks, with ``batch(generator)``, the inputs of a step.
A forward pass returns the loss.
"""

import torch
from torch import nn


class Mlp(nn.Module):
    """Several layers, so that small buckets are many."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(11, 23), nn.Tanh(), nn.Linear(23, 17), nn.Tanh(), nn.Linear(17, 31), nn.Tanh(), nn.Linear(31, 3)
        )

    def forward(self, x):
        return self.layers(x).square().mean()

    @staticmethod
    def batch(generator):
        return (torch.randn(4, 11, generator=generator),)


class ConvNet(nn.Module):
    """Channels-last weights, and buffers that batch normalization updates."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3, stride=2), nn.BatchNorm2d(5)
        )
        self.head = nn.Linear(5 * 4, 7)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.head(self.features(x).flatten(1)).square().mean()

    @staticmethod
    def batch(generator):
        return (torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last),)


class TiedLstm(nn.Module):
    """An LSTM whose output layer shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.output = nn.Linear(8, 13)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embedding(tokens))
        return nn.functional.cross_entropy(self.output(hidden).flatten(0, 1), tokens.flatten())

    @staticmethod
    def batch(generator):
        return (torch.randint(13, (3, 5), generator=generator),)


class Transformer(nn.Module):
    """Two encoder layers without dropout."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(19, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(16, 19)

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.output(self.encoder(self.embedding(tokens))).mT, tokens)

    @staticmethod
    def batch(generator):
        return (torch.randint(19, (2, 6), generator=generator),)


class MixedDtypes(nn.Module):
    """Parameters in fp32, fp64, bf16 and fp16: buckets of one dtype each."""

    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(9, 9, dtype=dtype) for dtype in dtypes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.float().square().mean()

    @staticmethod
    def batch(generator):
        return (torch.randn(4, 9, generator=generator),)


class FrozenAndShared(nn.Module):
    """A frozen layer, a frozen bias, and one layer that is used twice under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 10)
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.shared = nn.Linear(10, 10)
        self.again = self.shared
        self.last = nn.Linear(10, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        x = self.shared(self.frozen(self.first(x)).tanh()).tanh()
        return self.last(self.again(x)).square().mean()

    @staticmethod
    def batch(generator):
        return (torch.randn(4, 7, generator=generator),)


class Complex(nn.Module):
    """Complex parameters next to real ones; a conjugate in the loss."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
        self.second = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64).t())
        self.real = nn.Parameter(torch.randn(6))

    def forward(self, x):
        y = (x * self.real).to(torch.complex64) @ self.first.conj()
        return (y @ self.second.t()).abs().square().mean()

    @staticmethod
    def batch(generator):
        return (torch.randn(4, 6, generator=generator),)


class OddLayouts(nn.Module):
    """Transposed, permuted, gappy, zero-dimensional, empty and size-1 parameters."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(7, 5).t())
        self.permuted = nn.Parameter(torch.randn(3, 5, 2).permute(1, 2, 0))
        self.gappy = nn.Parameter(torch.randn(5, 12)[:, ::2])
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.ones = nn.Parameter(torch.randn(1, 5, 1).transpose(0, 2))

    def forward(self, x):
        parts = [
            x @ self.transposed,
            torch.einsum("bi,ijk->bjk", x, self.permuted).flatten(1),
            x @ self.gappy,
            x * self.ones.flatten() * self.scalar,
            (x.sum() * self.empty).flatten(),
        ]
        return sum(part.square().sum() for part in parts)

    @staticmethod
    def batch(generator):
        return (torch.randn(4, 5, generator=generator),)


class Half(Mlp):
    """Parameters in fp16."""

    dtype = torch.float16

    def __init__(self):
        super().__init__()
        self.to(self.dtype)

    @classmethod
    def batch(cls, generator):
        return (torch.randn(4, 11, generator=generator).to(cls.dtype),)


class Brain(Half):
    """Parameters in bf16."""

    dtype = torch.bfloat16


class Probe(nn.Module):
    """Parameters whose gradients are the inputs, exactly: the loss is the sum of parameter * input.

    A parameter whose input is None is unused.
    """

    def __init__(self, *shapes, dtype=torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, *inputs):
        pairs = zip(self.weights, inputs, strict=True)
        return sum((weight * x).sum() for weight, x in pairs if x is not None)


class SparseTable(nn.Module):
    """An embedding with sparse gradients, followed by a dense layer or by none. Not every hook's test can use it."""

    def __init__(self, has_dense_layer):
        super().__init__()
        self.table = nn.Embedding(64, 8, sparse=True)
        self.dense = nn.Linear(8, 8, bias=False) if has_dense_layer else nn.Identity()

    def forward(self, indices):
        return self.dense(self.table(indices)).square().sum()

    @staticmethod
    def batch(rank):
        """Four indices, some of them those of the next rank."""
        return (torch.arange(4) + rank,)


MODELS = {
    "mlp": Mlp,
    "conv": ConvNet,
    "lstm": TiedLstm,
    "transformer": Transformer,
    "mixed": MixedDtypes,
    "frozen": FrozenAndShared,
    "complex": Complex,
    "odd": OddLayouts,
    "half": Half,
    "brain": Brain,
}
