"""Groups of trajectories as columns: how they are packed on a stream, and how the trainer reads them."""
