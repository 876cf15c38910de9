"""Parameter shapes of real models, in the order of their ``parameters()``.

Each function follows the table of its source. A test compares the totals with the published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod

Shape = tuple[int, ...]


def resnet50() -> Iterator[Shape]:
    """ResNet-50: bottlenecks of stages 3, 4, 6, 3 (He et al., arXiv:1512.03385, table 1); torchvision's order."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            yield from ((width, channels, 1, 1), (width,), (width,))
            yield from ((width, width, 3, 3), (width,), (width,))
            yield from ((4 * width, width, 1, 1), (4 * width,), (4 * width,))
            if block == 0:
                yield from ((4 * width, channels, 1, 1), (4 * width,), (4 * width,))
            channels = 4 * width
    yield from ((1000, channels), (1000,))


def _encoder_layer(width: int) -> Iterator[Shape]:
    """Attention with one projection for queries, keys and values; two norms; an MLP of four times the width."""
    yield from ((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,))
    yield from ((width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,))


def vit_b16() -> Iterator[Shape]:
    """ViT-B/16 at 224 x 224: 12 layers of width 768 (Dosovitskiy et al., arXiv:2010.11929, table 1)."""
    yield from ((1, 1, 768), (768, 3, 16, 16), (768,), (1, 197, 768))
    for _ in range(12):
        yield from _encoder_layer(768)
    yield from ((768,), (768,), (1000, 768), (1000,))


def bert_base() -> Iterator[Shape]:
    """BERT-base, uncased, without a head: 12 layers of width 768, 30,522 tokens (Devlin et al., arXiv:1810.04805)."""
    yield from ((30522, 768), (512, 768), (2, 768), (768,), (768,))
    for _ in range(12):
        for _ in range(4):  # query, key, value, output
            yield from ((768, 768), (768,))
        yield from ((768,), (768,), (3072, 768), (3072,), (768, 3072), (768,), (768,), (768,))
    yield from ((768, 768), (768,))


def gpt2() -> Iterator[Shape]:
    """GPT-2, 124 M: 12 layers of width 768, 50,257 tokens, weights tied (Radford et al., 2019; table 2)."""
    yield from ((50257, 768), (1024, 768))
    for _ in range(12):
        yield from _encoder_layer(768)
    yield from ((768,), (768,))


def llama_1b() -> Iterator[Shape]:
    """The layers of Llama 3.2 1B: 16 of width 2048, 8 key-value heads of 64, MLP 8192, no biases; no embeddings.

    Source: the published configuration; the architecture of arXiv:2302.13971 with grouped queries (arXiv:2305.13245).
    """
    for _ in range(16):
        yield from ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048))
        yield from ((8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,))
    yield (2048,)


SHAPES: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": resnet50,
    "vit-b16": vit_b16,
    "bert-base": bert_base,
    "gpt2-124m": gpt2,
    "llama-1b": llama_1b,
}

ROTATION_MIB = 100  # size of the buckets in rotation, so that no cache holds them


def rotation(model_buckets: list[list[Shape]], size_mib: int) -> list[list[Shape]]:
    """The buckets of a model that kernel benchmarks cycle through, each full at ``size_mib``."""
    return model_buckets[: -(-ROTATION_MIB // size_mib)]


def mean_mib(model_buckets: Sequence[Sequence[Shape]]) -> int:
    """The mean size of buckets in fp32, in whole MiB."""
    return round(4 * sum(prod(shape) for bucket in model_buckets for shape in bucket) / len(model_buckets) / (1 << 20))


def buckets(shapes: Callable[[], Iterator[Shape]], nbytes: int) -> list[list[Shape]]:
    """DDP's buckets in fp32: from the last parameter to the first, each closed once it reaches ``nbytes``."""
    ends, filled = [0], 0
    backwards = list(shapes())[::-1]
    for i, shape in enumerate(backwards, start=1):
        filled += 4 * prod(shape)
        if filled >= nbytes or i == len(backwards):
            ends.append(i)
            filled = 0
    return [backwards[first:last] for first, last in pairwise(ends)]
