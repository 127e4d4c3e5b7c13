"""What a run needs before it starts: memory a GPU, memory a machine, time a step. Arithmetic alone, without torch."""
