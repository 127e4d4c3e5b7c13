"""The direct stream between agents and engines: frames, both ends of a connection, and the choice of a replica."""
