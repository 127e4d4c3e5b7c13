"""Engines that sample tokens: vLLM in process, or a remote OpenAI-compatible endpoint."""
