"""The process in front of the deployments: gRPC, HTTP, health, metrics."""
