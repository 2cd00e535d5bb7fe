"""`python -m unified_master.gateway`, the same as the command `unified-gateway`."""

import sys

from unified_master.gateway.cli import main

if __name__ == "__main__":
    sys.exit(main())
