"""The history of a run, and the rules that it obeys whatever died."""
