"""The multi-turn loop of one trajectory: pure functions and data, no clock, no network."""
