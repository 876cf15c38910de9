"""``python -m gradwire.bench.gpu`` runs `gradwire.bench.gpu.lane`."""

import sys

from gradwire.bench.gpu.lane import main

if __name__ == "__main__":
    sys.exit(main())
