"""What a run reads and writes: questions, trajectories and the files of a step, in Parquet."""
