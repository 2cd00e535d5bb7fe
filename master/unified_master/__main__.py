"""``python -m unified_master``."""

import sys

from unified_master.cli import main

if __name__ == "__main__":
    sys.exit(main())
