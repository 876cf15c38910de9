"""``make gpu-rehearsal``: the cases of the GPU lane on the CPU: ``python -m tests.support.rehearse smoke``.

The kernels run as their CPU code, collectives over gloo with NCCL's rules enforced; streams, events and graphs have
stand-ins (`tests.support.rehearsal`). A rehearsal finds mistakes in the cases and in code that both devices share. Its
times say nothing about a GPU, and every line and record says so.
"""

import sys

from gradwire.bench.gpu import lane
from tests.support.rehearsal import enter

if __name__ == "__main__":
    sys.exit(lane.main(rehearse=enter))
