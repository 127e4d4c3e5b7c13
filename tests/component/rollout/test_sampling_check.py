"""vLLM's bounds of sampling are asked of vLLM: each refusal names our setting, its value and vLLM's words."""

from __future__ import annotations

from typing import Any

import pytest

from forage_proto.v1.trajectory_pb2 import Sampling
from forage_rollout.engine.sampling_check import check_before_start, check_sampling
from forage_rollout.engine.sampling_parameters import RefusedSamplingError, build_parameters, find_refusal
from forage_rollout.engine.stops import StopTexts
from forage_rollout.loop.generation import GenerationRequest
from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings, load_settings

PENALTY = "trainer.algorithm.probe_penalty"
SAMPLED: dict[str, Any] = {"token_ids": [0], "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None}


def load(*overrides: str) -> Settings:
    return load_settings(None, list(overrides), {})


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["rollout.temperature=2.5"],
            "rollout.temperature = 2.5: vLLM cannot sample so for training (temperature must be in [0, 2], got 2.5): "
            "set rollout.temperature to what vLLM takes",
        ),
        (["rollout.top_k=-5"], "rollout.top_k = -5: vLLM cannot sample so for training (top_k must be 0"),
        (
            ["trainer.probe.freq=1", "trainer.probe.samples=20000"],
            "trainer.probe.samples = 20000: vLLM cannot sample so for the probe (n must be at most 16384",
        ),
        (
            [f"{PENALTY}.coef=0.1", "trainer.probe.samples=20000"],
            "trainer.probe.samples = 20000: vLLM cannot sample so for the probe (n must be at most 16384",
        ),
    ],
)
def test_a_setting_that_vllm_refuses_is_named_in_one_line(
    overrides: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_MAX_N_SEQUENCES", raising=False)
    with pytest.raises(SettingsError) as caught:
        check_sampling(load(*overrides))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],  # `check_before_start` relies on this one
        [f"{PENALTY}.coef=0.1", "trainer.probe.freq=1"],
        ["rollout.temperature=2", "rollout.top_p=0.5", "rollout.top_k=0"],
        ["rollout.temperature=0", "rollout.n=8", "rollout.max_response_length=1"],
        ["trainer.probe.samples=20000"],  # nothing is probed
        ["rollout.temperature=50", "rollout.top_k=-5", "rollout.engine.endpoint=http://host:1/v1"],
    ],
)
def test_what_vllm_takes_and_what_it_does_not_see_is_not_refused(overrides: list[str]) -> None:
    check_sampling(load(*overrides))


def test_the_service_asks_before_it_starts() -> None:
    with pytest.raises(SettingsError, match=r"rollout\.temperature = 3\.0"):
        check_before_start(load("rollout.temperature=3"))
    check_before_start(load())
    check_before_start(load("rollout.temperature=3", "rollout.engine.endpoint=http://host:1/v1"))


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_a_request_that_vllm_refuses_names_the_parameter(values: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RefusedSamplingError) as caught:
        build_parameters(GenerationRequest(**({"max_tokens": 4} | SAMPLED | values)), StopTexts({}))
    assert caught.value.parameter == parameter
    assert parameter in str(caught.value)


def test_a_sampling_is_taken_or_refused_with_vllms_words() -> None:
    assert find_refusal(Sampling(), StopTexts({})) == ("", "")
    assert find_refusal(Sampling(temperature=5), StopTexts({})) == (
        "temperature",
        "temperature must be in [0, 2], got 5.0",
    )
