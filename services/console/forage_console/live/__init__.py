"""What the services of a run say and do now."""
