"""A script without torch, for what a launcher costs: `plain.py FOLDER` is ready at once."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    aside = folder / f".{os.getpid()}"
    aside.write_text(json.dumps({"at": time.time(), "pid": os.getpid(), "rank": rank}))
    aside.rename(folder / f"{rank}-{os.getpid()}.json")
