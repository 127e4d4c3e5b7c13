"""`forage index`: builds, inspects, verifies, measures and converts indexes."""
