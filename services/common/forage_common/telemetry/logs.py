"""Structured logs: one JSON object per line on stderr."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from forage_common.telemetry import tracing


def configure_logs(service: str, level: str = "INFO") -> None:
    """Write this process's logs to stderr, one JSON object per line, also those of libraries."""
    fields: list[Any] = [
        structlog.contextvars.merge_contextvars,
        tracing.add_log_fields,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[Any] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=str),
    ]
    libraries = logging.StreamHandler(sys.stderr)
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
            foreign_pre_chain=[*fields, structlog.stdlib.add_logger_name],
        )
    )
    logging.basicConfig(handlers=[libraries], level=logging.WARNING)
    structlog.configure(
        processors=[*fields, *render],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def get_logger() -> Any:
    """A structured logger: `log.info("event_name", key=value)`."""
    return structlog.get_logger()
