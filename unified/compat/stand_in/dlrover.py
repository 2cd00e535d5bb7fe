"""Stand-in for `dlrover` until the alias or the real package is imported: see this package."""

import contextlib
import importlib
import os
import sys

if __name__ == "dlrover":
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    del sys.modules[__name__]
    with contextlib.suppress(ModuleNotFoundError):  # another interpreter; it may have the real package
        importlib.import_module("unified")  # looks at UNIFIED_COMPAT
    importlib.import_module(__name__)
