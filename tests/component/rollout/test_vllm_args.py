"""What `rollout.engine.args` may hold, and what vLLM is started with on each kind of device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forage_rollout.engine.instance import start_with
from forage_rollout.vllm_start.vllm_args import build_arguments, check_arguments
from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings


def make_settings(repeatable: bool = False, **engine: Any) -> Settings:
    run = {"repeatable": repeatable}
    rollout = {"engine": engine, "weights": {"update": "drain"}}
    return Settings.model_validate({"run": run, "rollout": rollout, "trainer": {"max_staleness": 0}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kv_cache_dtyp": "fp8"},
            "kv_cache_dtyp is no argument of vLLM's AsyncEngineArgs; did you mean kv_cache_dtype",
        ),
        ({"_api_process_count": 2}, "_api_process_count is no argument"),
        ({"max_num_seqs": 8}, "max_num_seqs is set by rollout.engine.max_num_seqs: set that instead"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode is set by trainer.placement"),
        ({"seed": 1}, "seed is set by run.seed"),
        ({"logprobs_mode": "raw_logprobs"}, "cannot be set: the trainer needs log-probabilities of the distribution"),
        ({"data_parallel_rank": 1}, "data_parallel_rank cannot be set: Forage places replicas itself"),
        ({"load_format": "dummy"}, "would sample from random weights"),
        ({"load_format": "Dummy"}, "would sample from random weights"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens = 'many' is no value for vLLM: Input should be a"),
        ({"kv_cache_dtype": "fp7"}, "kv_cache_dtype = 'fp7' is no value for vLLM: Input should be 'auto'"),
        ({"attention_config": {"backend": 7}}, "attention_config.backend = 7 is no value for vLLM"),
    ],
)
def test_a_bad_argument_is_named_with_what_to_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_arguments(given)
    assert str(caught.value).startswith("rollout.engine.args.")
    assert message in str(caught.value)


def test_values_arrive_as_vllm_takes_them() -> None:
    given = {"max_num_batched_tokens": "8192", "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    assert check_arguments(given) == {**given, "max_num_batched_tokens": 8192}
    assert check_arguments({}) == {}


def test_every_name_that_forage_keeps_for_itself_is_an_argument_of_vllm() -> None:
    """Else a new vLLM would answer with a sentence about a setting that sets nothing."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    from forage_rollout.vllm_start import vllm_args

    known = {field.name for field in fields(AsyncEngineArgs)}
    assert (vllm_args._SETTINGS.keys() | vllm_args._REFUSED.keys() | vllm_args._INEXACT.keys()) <= known
    own = build_arguments(make_settings(max_lora_rank=8), cpu=True).keys()
    free = own - vllm_args._SETTINGS.keys() - vllm_args._REFUSED.keys()
    defaults = {"block_size", "enable_chunked_prefill", "enforce_eager", "max_num_batched_tokens"}
    assert free == defaults, "what Forage sets would be overwritten"


def test_eager_is_left_to_the_device() -> None:
    def is_eager(cpu: bool, **engine: Any) -> object:
        return build_arguments(make_settings(**engine), cpu)["enforce_eager"]

    assert (is_eager(True), is_eager(False)) == (True, False)
    for eager in (True, False):
        assert is_eager(not eager, args={"enforce_eager": eager}) is eager


def test_arguments_take_the_place_of_forages_defaults_but_not_of_what_a_run_needs() -> None:
    given = {"max_num_batched_tokens": 9000, "enable_prefix_caching": True}
    assert build_arguments(make_settings(args=given), cpu=True).items() >= given.items()
    repeatable = build_arguments(make_settings(args=given, repeatable=True, max_num_seqs=1), cpu=True)
    assert repeatable["enable_prefix_caching"] is False
    with pytest.raises(SettingsError, match=r"args\.enable_chunked_prefill = true needs a GPU"):
        build_arguments(make_settings(args={"enable_chunked_prefill": True}), cpu=True)
    assert "max_num_batched_tokens" not in build_arguments(make_settings(), cpu=False)


def test_a_model_with_states_starts_without_a_prefix_cache_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from model_families import build_config

    build_config("granitemoehybrid").save_pretrained(tmp_path)
    policy = Path(__file__).parents[3] / "models/tiny-policy"
    for folder, has_cache in ((policy, True), (tmp_path, False)):
        chosen = make_settings(max_model_len=128)
        given = build_arguments(chosen, cpu=True) | {"model": str(folder), "tokenizer": str(policy)}
        config = start_with(given, lambda args: args.create_engine_config())
        assert config.cache_config.enable_prefix_caching is has_cache
        assert ("prefix_cache_off" in capsys.readouterr().err) is not has_cache
    with pytest.raises(Exception, match="Chunked prefill is required"):
        start_with(given | {"enable_prefix_caching": True}, lambda args: args.create_engine_config())
