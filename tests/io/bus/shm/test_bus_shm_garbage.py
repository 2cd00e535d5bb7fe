"""Mapped memory among garbage: what refers to itself may touch it in its finalizer."""

import subprocess
import sys
from pathlib import Path

CODE = """
import gc, os, sys
from unified.bus.shm.segment import Mapping

class Claim:
    def __del__(self):
        self.words[0] += 1  # as a reference is given back

def garbage(path):
    descriptor = os.open(path, os.O_RDWR)
    mapping = Mapping(descriptor, 8192, writable=True)
    os.close(descriptor)
    reference = Claim()
    reference.words, reference.itself = mapping.words(1), reference
    return mapping.address

path = sys.argv[1]
places = []
for _ in range(50):
    places.append(garbage(path))
    gc.collect()
mapped = [line for line in open("/proc/self/maps") if path in line]
assert not mapped, mapped
print(int.from_bytes(open(path, "rb").read(8), sys.byteorder))
"""


def test_memory_is_there_until_all_finalizers_have_run_and_then_it_is_unmapped(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(8192))
    done = subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "50\n", "")
