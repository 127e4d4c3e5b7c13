"""The gRPC service: queue, workers, metrics, shadow scoring."""
