"""`python -m unified.training`: see `unified.training.program`."""

import sys

from unified.training.program import main

if __name__ == "__main__":
    sys.exit(main())
