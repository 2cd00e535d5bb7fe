"""The entry of workers that do without torch: what `unified.worker.main` is, but that zygotes preload no torch."""

import runpy

from unified.worker.main import PRELOAD as ALL
from unified.worker.main import main as main

PRELOAD = tuple(name for name in ALL if name.partition(".")[0] != "torch")
PRELOAD_LATER = ()

if __name__ == "__main__":
    runpy.run_module("unified.worker.main", run_name="__main__")
