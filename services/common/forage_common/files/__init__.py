"""File formats that services and the `forage` command share, and durable writes."""
