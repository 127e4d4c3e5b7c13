"""The Ray Serve deployments and the Ray cluster that they run in."""
