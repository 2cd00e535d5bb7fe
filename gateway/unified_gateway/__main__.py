"""`python -m unified_gateway`, the same as the command `unified-gateway`."""

import sys

from unified_gateway.cli import main

if __name__ == "__main__":
    sys.exit(main())
