"""Logs, metrics, health and traces, the same for every service."""
