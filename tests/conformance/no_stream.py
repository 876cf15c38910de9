"""Streams and events that do nothing: on the CPU, work is done in the order in which it is written down."""

import torch


class NoStream:
    """Stands for a stream or an event."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, *_, **__):
        pass

    record = record_event = synchronize = wait_event = wait_stream = wait


def no_streams():
    """Let PyTorch's streams and events do nothing, for the rest of this process."""
    torch.Stream = torch.Event = NoStream
    torch.accelerator.current_stream = lambda: NoStream()
