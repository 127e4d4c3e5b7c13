"""Why an engine does not start: what comes first, and whether another try may help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from forage_rollout.vllm_start.start_errors import EngineStartError, LastingStartError, describe_failure, read_failure
from forage_runtime.errors import SettingsError

MODEL = Path("/models/mine")


class ModelConfig(BaseModel):
    heads: int

    @field_validator("heads")
    @classmethod
    def check(cls, heads: int) -> int:
        if heads == 3:
            raise ValueError("3 heads\ncannot be divided")
        return heads


def validate(heads: object) -> ValidationError:
    with pytest.raises(ValidationError) as raised:
        ModelConfig.model_validate({"heads": heads})
    return raised.value


LASTING = [
    (validate(3), "ModelConfig: heads: 3 heads cannot be divided"),
    (SettingsError("rollout.engine.args.x is no argument"), "rollout.engine.args.x is no argument"),
    (ValueError("no KV cache\n for it"), "ValueError: no KV cache for it"),
    (FileNotFoundError(2, "No such file", f"{MODEL}/a"), f"FileNotFoundError: [Errno 2] No such file: '{MODEL}/a'"),
    (AssertionError("4 by 3"), "AssertionError: 4 by 3"),
]
PASSING = [
    FileNotFoundError(2, "No such file", "/root/.triton/cache/a"),
    RuntimeError("CUDA error"),
    OSError("Connection refused"),
    json.JSONDecodeError("half a file", "{", 1),
    ValueError("Free memory on device cuda:0 (3/80 GiB) on startup is less than desired"),
    AssertionError("Error in memory profiling. Initial free memory 3 GiB"),
]


@pytest.mark.parametrize(("error", "reason"), LASTING)
def test_what_the_configuration_and_the_model_say_lasts(error: Exception, reason: str) -> None:
    failure = describe_failure(error, MODEL)
    assert (failure.reason, failure.lasts) == (reason, True)


@pytest.mark.parametrize("error", PASSING)
def test_what_the_machine_says_may_pass(error: Exception) -> None:
    assert not describe_failure(error, MODEL).lasts


def test_the_root_cause_comes_first() -> None:
    outer, inner = RuntimeError("the worker failed"), KeyError("lm_head.weight")
    outer.__cause__ = inner
    failure = describe_failure(outer)
    assert failure.reason == "KeyError: 'lm_head.weight', hence RuntimeError: the worker failed"
    assert failure.lasts
    assert "direct cause" in failure.details


@pytest.mark.parametrize("kind", [EngineStartError, LastingStartError])
def test_serves_text_of_an_error_is_read(kind: type[EngineStartError]) -> None:
    failure = describe_failure(ValueError("4 heads: no"))
    text = f"A replica failed to start with exception. Retrying 2 more time(s). Error:\nTraceback\n{kind.__module__}."
    message = f"{text}{kind.__name__}: {failure.reason}\n"
    assert read_failure(message) == ("ValueError: 4 heads: no", kind is LastingStartError)


def test_of_another_error_the_last_line_is_the_reason() -> None:
    assert read_failure("Error:\nTraceback\n  line\nredis.exceptions.ConnectionError: refused\n\n") == (
        "redis.exceptions.ConnectionError: refused",
        False,
    )
    assert read_failure("") == ("", False)
