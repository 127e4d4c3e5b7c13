"""Deterministic simulation: trainer, rollout service, supervisor and Redis in one process, on a virtual clock.

A schedule follows from its seed alone: settings, durations, the order of concurrent calls, and the faults. The programs
are the real ones; `world` runs them as processes, `machine` is the machine that they see, `redis_server` their Redis.
"""
