"""``python -m unified_agent``."""

import sys

from unified_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
