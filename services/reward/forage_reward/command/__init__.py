"""`forage reward`: lists rewards, explains one score, scores a dump."""
