"""The training program, by the name that trainer images start: `torchrun … train.py --framework hf …`."""

import sys

from unified.training.program import main

if __name__ == "__main__":
    sys.exit(main())
