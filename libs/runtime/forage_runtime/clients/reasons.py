"""The reason of a failed call, in a sentence for the operator."""

from __future__ import annotations

import grpc

from forage_runtime.security.handshakes import explain_tls


def describe_error(error: BaseException) -> str:
    """What a failed TLS handshake means, else what the service or the network said."""
    said = (error.details() or error.code().name) if isinstance(error, grpc.RpcError) else str(error)
    return explain_tls(error) or said or type(error).__name__
