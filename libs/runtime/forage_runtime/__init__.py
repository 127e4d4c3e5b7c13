"""Parts shared by all Forage services: contracts, settings, streams, clients, files and telemetry."""

import os

# Before gRPC is imported: it would write a line, which is no JSON, for each handshake that anybody breaks off and for
# each frame that is wrong.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__version__ = "0.1.0"
