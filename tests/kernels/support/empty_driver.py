"""A GPU that does nothing: Triton compiles and launches kernels for it, on CPU tensors, and none of them runs.

It shows what the host does for a launch, on a machine without a GPU.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import triton

from tests.kernels.support.ahead_of_time import TARGETS, kernel_modules

# Of all drivers: a kernel stays bound to the driver that it was compiled for.
_launches = []


class EmptyDriver:
    """Stands in for Triton's driver.

    Attributes:
        launches: the grid, the compiled kernel and the arguments of every launch since the driver was made.
    """

    def __init__(self):
        _launches.clear()
        self.launches = _launches
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
            load_binary=lambda name, binary, shared, device: (name, name, 0, 0, 1024),
        )

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return TARGETS["sm_90"]

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments):
            self.launches.append(((x, y, z), function, arguments))

        return launch


@contextmanager
def empty_gpu():
    """Yields the driver; meanwhile the operations launch Triton kernels on CPU tensors."""
    driver, before = EmptyDriver(), triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module in kernel_modules():
                patch.setattr(module, "use_triton", lambda device: True, raising=False)
            yield driver
    finally:
        triton.runtime.driver._active = before
