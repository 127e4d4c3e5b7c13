"""Clients of the services, with deadlines, retries and circuit breakers."""
