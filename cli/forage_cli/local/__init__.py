"""The services as processes on this machine: start, supervision, checks before the start, live view."""
