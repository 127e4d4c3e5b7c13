"""The parts of a build: stages, shards in processes, and the check of what was built."""
