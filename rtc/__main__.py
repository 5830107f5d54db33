"""``python -m rtc``, and ``torchrun --nproc-per-node 2 -m rtc run TARGET``."""

import sys

from rtc.cli import main

if __name__ == "__main__":
    sys.exit(main())
