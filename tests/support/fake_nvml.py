"""A stand-in for NVIDIA's management library, for machines without their devices."""

import shutil
import subprocess
from pathlib import Path

import pytest

NVML = r"""
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
typedef struct { unsigned long long total, free, used; } Memory;
static int lost(void *h) { char *l = getenv("FAKE_LOST"); return l && atoi(l) == (int)(long)h - 1; }
int nvmlInit_v2(void) { return getenv("FAKE_BROKEN") ? 9 : 0; }
int nvmlInitWithFlags(unsigned f) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return "as the test says"; }
int nvmlDeviceGetCount_v2(unsigned *n) { char *c = getenv("FAKE_COUNT"); *n = c ? atoi(c) : 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(long)(i + 1); return lost(*h) ? 15 : 0; }
int nvmlDeviceGetName(void *h, char *b, unsigned n) { snprintf(b, n, "Fake %ld", (long)h - 1); return 0; }
int nvmlDeviceGetUUID(void *h, char *b, unsigned n) { snprintf(b, n, "GPU-%ldabc", (long)h - 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, Memory *m) { m->total = 80ULL << 30; m->free = m->total; m->used = 0; return 0; }
"""


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``LD_LIBRARY_PATH``: its NVML knows ``FAKE_COUNT`` devices (3), of which ``FAKE_LOST`` is silent."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    command = [compiler, "-shared", "-fPIC", "-w", "-o", str(folder / "libnvidia-ml.so.1"), str(folder / "nvml.c")]
    subprocess.run(command, check=True)
    return folder
