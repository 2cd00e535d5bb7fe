"""A service, which `call.py` calls from another process."""

import subprocess
import sys

from unified import DLJobBuilder, rpc


class Words:
    @rpc()
    def count(self, text: str) -> int:
        return len(text.split())


if __name__ == "__main__":
    job = DLJobBuilder().device_type("CPU").workload("words", "submit.Words").resource(cpu=0.1)
    with job.build().submit("words", blocking=False) as handle:
        subprocess.run([sys.executable, f"{sys.path[0]}/call.py", handle.connection.address], check=True)
        handle.stop()
