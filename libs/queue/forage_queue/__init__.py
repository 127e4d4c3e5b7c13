"""The first wire: prompts and groups on Redis streams, each exactly once, and the checker of what happened."""
