"""A whole Forage on this machine: processes, supervision, the live view and the report."""
