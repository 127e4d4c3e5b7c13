"""vLLM's engine core: the arguments and the environment that it is started with, and its process."""
