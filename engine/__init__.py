"""The serving engine: batches, models, execution. Knows nothing of HTTP, tenants' rights or text.

Sets what the numeric libraries read when they load, and therefore before anything here imports torch. What the
operator has set stays. MKL otherwise rounds by how its buffers happen to be aligned, so that a row's bits would depend
on its batch mates. OpenMP's threads otherwise spin while they wait: where another process wants a core, a step of 40 ms
then took over a second. For a few tens of microseconds they may: to be woken takes longer than the pause between two
operations of a layer.
"""

import os

os.environ.setdefault("MKL_CBWR", "AUTO")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
