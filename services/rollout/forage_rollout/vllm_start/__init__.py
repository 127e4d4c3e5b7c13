"""How vLLM is started: its arguments and environment, the server that its process is forked from, errors of a start."""
