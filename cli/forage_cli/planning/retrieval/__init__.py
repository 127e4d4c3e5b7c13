"""Whether the retriever of a run answers as fast as its trajectories search."""
