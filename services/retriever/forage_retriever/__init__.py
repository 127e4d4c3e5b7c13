"""Search over a corpus: BM25, dense and hybrid, over HTTP and gRPC."""

import os

# Read once, when FAISS loads OpenMP: idle threads that spin would take a container's CPU time from the next batch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
