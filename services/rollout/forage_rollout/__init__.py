"""The multi-turn search loop on vLLM and Ray Serve."""
