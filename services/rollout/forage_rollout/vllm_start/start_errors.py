"""Why an engine does not start: the root cause in one line, the whole error, and whether another try may help.

vLLM starts its engine in processes of its own and says of their errors only that there was one. Those processes write
theirs to a file that the replica names in its environment.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from forage_runtime.errors import ForageError, UserError

_FILE_VARIABLE = "FORAGE_ENGINE_START_ERROR"
_FAILED = "failed to start"
"""vLLM logs "EngineCore failed to start." and "WorkerProc failed to start.", each with the error."""
_LASTING = (
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    ModuleNotFoundError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""What a refused configuration and damaged weights raise; exactly these: a subclass may tell of a partial file."""
_PASSING = ("Free memory on device", "Error in memory profiling")
"""Parts of messages of those types that tell of a state that passes: another process uses the memory of the GPU."""


@dataclass(frozen=True)
class StartFailure:
    """One error of an engine's start.

    Attributes:
        reason: one line, the root cause first.
        details: the error with its traceback.
        lasts: whether another try would end the same.
    """

    reason: str
    details: str
    lasts: bool


class EngineStartError(ForageError):
    """An engine did not start; the message is the failure's reason."""

    def __init__(self, failure: StartFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class LastingStartError(EngineStartError):
    """No other try would end otherwise: the configuration is refused, a file is missing, or memory is too small."""


def describe_failure(error: BaseException, model: Path | None = None) -> StartFailure:
    """Describe an error of an engine's start.

    Args:
        model: the model's folder: a file that is missing there stays missing.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    reason = ", hence ".join(_describe_in_a_line(one) for one in reversed(chain))
    return StartFailure(reason, "".join(traceback.format_exception(error)), any(_lasts(one, model) for one in chain))


def _describe_in_a_line(error: BaseException) -> str:
    if isinstance(error, UserError):
        text = str(error)
    elif isinstance(error, ValidationError):
        wrong = [(*map(str, one["loc"]), one["msg"].removeprefix("Value error, ")) for one in error.errors()]
        text = f"{error.title}: " + "; ".join(": ".join(parts) for parts in wrong)
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _lasts(error: BaseException, model: Path | None) -> bool:
    if isinstance(error, FileNotFoundError):
        return model is not None and str(model) in f"{error.filename} {error}"
    if isinstance(error, UserError | ValidationError) or type(error).__name__ == "SafetensorError":
        return True
    return type(error) in _LASTING and not any(part in str(error) for part in _PASSING)


def read_failure(message: str) -> tuple[str, bool]:
    """Read (reason, whether it lasts) from what Ray Serve says of a deployment whose replicas do not start.

    Serve passes on an error's traceback as text. Of another error than an `EngineStartError` its last line is the
    reason. ("", False) where the text is empty.
    """
    if found := _RAISED.findall(message):
        kind, reason = found[-1]
        return reason, kind == LastingStartError.__name__
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else ""), False


_RAISED = re.compile(
    rf"^{re.escape(__name__)}\.({EngineStartError.__name__}|{LastingStartError.__name__}): (.*)$", re.MULTILINE
)


class _Recorder(logging.Handler):
    """Writes the first error with which a process of vLLM's did not start to the replica's file."""

    def emit(self, record: logging.LogRecord) -> None:
        file = os.environ.get(_FILE_VARIABLE)
        error = record.exc_info[1] if record.exc_info else None
        if not file or error is None or _FAILED not in record.getMessage():
            return
        model = os.environ.get(f"{_FILE_VARIABLE}_MODEL")
        failure = describe_failure(error, Path(model) if model else None)
        part = Path(f"{file}.{os.getpid()}")
        part.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        try:
            os.link(part, file)  # the error of a worker comes before the core's, which only says that a worker failed
        except FileExistsError:
            part.unlink()


def record_start_errors() -> None:
    """In a process of vLLM's: tell the replica with which error it does not start. A second call does nothing."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _Recorder) for handler in logger.handlers):
        logger.addHandler(_Recorder(logging.ERROR))


@contextmanager
def explain_start(model: Path) -> Iterator[None]:
    """Turn every error of the block, which starts an engine, into an `EngineStartError`.

    Raises:
        EngineStartError: from the original error.
    """
    with tempfile.TemporaryDirectory(prefix="forage-engine-") as folder:
        file = Path(folder) / "error.json"
        os.environ |= {_FILE_VARIABLE: str(file), f"{_FILE_VARIABLE}_MODEL": str(model)}
        try:
            yield
        except Exception as error:
            failure = describe_failure(error, model)
            if file.exists():
                inner = StartFailure(**json.loads(file.read_text(encoding="utf-8")))
                details = f"{inner.details}\nin a process of the engine, hence\n\n{failure.details}"
                failure = StartFailure(inner.reason, details, inner.lasts)
            raise (LastingStartError if failure.lasts else EngineStartError)(failure) from error
        finally:
            for name in (_FILE_VARIABLE, f"{_FILE_VARIABLE}_MODEL"):
                os.environ.pop(name, None)
