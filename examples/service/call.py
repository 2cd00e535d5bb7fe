import sys

import unified

with unified.connect(*sys.argv[1:]) as cluster:  # without an address: UNIFIED_MASTER, or the cluster on this host
    print(cluster.job("words").call("words", "count", "a service called from another process").result(), "words")
