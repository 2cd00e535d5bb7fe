"""``python -m unified`` is the command line."""

from __future__ import annotations

import sys

from unified.cli.main import main

sys.exit(main())
