"""The multi-turn loop of one trajectory: pure, without clock or network."""
