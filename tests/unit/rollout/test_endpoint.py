"""What an endpoint leaves out of its texts, and addresses that are none."""

from __future__ import annotations

import pytest

from forage_rollout.engine.endpoint import restore_stop_text
from forage_runtime.settings import EngineSettings

STOPS = ("</search>", "</answer>")


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("<think>a</think><search> b ", None, "<think>a</think><search> b </search>"),
        ("<search>a</search> <answer> b", None, "<search>a</search> <answer> b"),  # ended at the first stop already
        ("<search> a <answer> b", None, "<search> a <answer> b</answer>"),
        ("<search> a", "</answer>", "<search> a</answer>"),
        ("it has just ended", None, "it has just ended"),
        ("it has just ended", 17, "it has just ended"),
        ("", None, ""),
    ],
)
def test_the_stop_text_that_a_server_removes_is_restored(text: str, reason: object, expected: str) -> None:
    assert restore_stop_text(text, reason, STOPS) == expected


def test_an_invalid_endpoint_address_is_refused() -> None:
    for wrong in ("127.0.0.1:8000/v1", "http://host", "http://host/v1/", "ftp://host/v1"):
        with pytest.raises(ValueError, match="endpoint"):
            EngineSettings(endpoint=wrong)
