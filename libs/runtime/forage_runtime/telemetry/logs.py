"""Structured logs on stderr, without the credentials that a URL in it may hold: services write a JSON object per line,
commands a line for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from forage_runtime.telemetry import tracing
from forage_runtime.text.redaction import redact_text
from forage_runtime.text.terminal import printable

SERVICE_FAILED = "service_failed"
"""The event with which a service ends that died of an error; `reason` is the error in one line."""


def configure_logs(service: str, level: str = "INFO") -> None:
    """Write this process's logs to stderr, one JSON object per line; also what libraries log, tracebacks included."""
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, tracing.add_log_fields, *_PROCESSORS, _RENDERER],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level)),
        # One write a line: `print` makes two, and the line of a library in another thread may fall between them.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            # Threads of libraries have none of the variables that were bound above.
            foreign_pre_chain=[structlog.stdlib.add_logger_name, _bind_service(service)],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_PROCESSORS, _RENDERER],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def get_logger() -> Any:
    """A structured logger: `log.info("event_name", key=value)`."""
    if not structlog.is_configured():
        _show_logs()
    return structlog.get_logger()


def _show_logs() -> None:
    """Write the logs of a process that is no service for people, wherever stderr is then: a live view redirects it."""
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *_PROCESSORS, _render_line],
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
    )


def _render_line(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    """As `warning: service_died: no engine (name=rollout, code=1)`."""
    level, name, _, exception = (event.pop(key, "") for key in ("level", "event", "timestamp", "exception"))
    sentence = str(event.pop("detail", "") or event.pop("reason", ""))
    others = ", ".join(f"{key}={value}" for key, value in event.items())
    line = ": ".join(filter(None, [level, name, sentence])) + (f" ({others})" if others else "")
    return "\n".join(filter(None, [printable(" ".join(line.split())), exception]))


def _bind_service(service: str) -> Any:
    def bind(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {"service": service, **event}

    return bind


def _redact_event(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: _redact_value(value) for name, value in event.items()}


def _redact_value(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {str(name): _redact_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float) else redact_text(str(value))


_PROCESSORS: tuple[Any, ...] = (
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
    _redact_event,
)
# JSON's escapes keep line feeds, terminal escapes and everything beyond ASCII out of the line.
_RENDERER = structlog.processors.JSONRenderer(ensure_ascii=True)
