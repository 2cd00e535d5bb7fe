"""Stands in for `dlrover` until that is imported: see the package."""

import contextlib
import importlib
import os
import sys

if __name__ == "dlrover":
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    del sys.modules[__name__]
    with contextlib.suppress(ModuleNotFoundError):  # another interpreter, which may have the real one
        importlib.import_module("unified")  # which looks at UNIFIED_COMPAT
    importlib.import_module(__name__)
