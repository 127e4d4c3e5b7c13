"""A collector in a process of its own that counts spans: `python collector.py` prints its port, and how many at the end
of its input."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Counting(TraceServiceServicer):
    """Counts spans."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        self.spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return ExportTraceServiceResponse()


def main() -> None:
    counting, server = Counting(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(counting, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(5).wait()
    print(counting.spans)


if __name__ == "__main__":
    main()
