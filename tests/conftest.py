"""For every test: what the agent gives its workers, given to the test process itself."""

from __future__ import annotations

import os
import signal

# torch's TCPStore looks up its peers' names; a packet that the name server loses would cost 5 s (see RESOLVER in
# unified_agent.environment). Set here, before anything resolves a name.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# A tester who has a cluster of their own has a key, which the clusters of these tests have not.
os.environ["UNIFIED_KEY_FILE"] = ""

# A shell that starts this in the background has it ignore interrupts, which some tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)
