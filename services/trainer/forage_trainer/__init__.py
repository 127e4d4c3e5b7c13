"""GRPO for search agents on verl's engines."""
