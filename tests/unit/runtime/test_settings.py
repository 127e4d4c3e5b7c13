"""The settings tree: sources, precedence, and errors that name the key and the remedy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings, load_settings, settings_from_arguments


def test_the_environment_overrides_the_file_and_the_command_line_overrides_both(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("run: {seed: 1}\nrollout: {n: 2, max_turns: 5}\n")
    environ = {"FORAGE__RUN__SEED": "2", "FORAGE__ROLLOUT__N": "3", "PATH": "/bin"}
    settings = load_settings(file, ["run.seed=4"], environ)
    assert (settings.run.seed, settings.rollout.n, settings.rollout.max_turns) == (4, 3, 5)


def test_a_resolved_tree_reads_back_equal(tmp_path: Path) -> None:
    given = ["trainer.actor.optim.lr=3e-4", "reward.routes.nq.name=em", "reward.routes.nq.params.most=.inf"]
    settings = load_settings(None, given, {})
    file = tmp_path / "s.yaml"
    file.write_text(settings.to_yaml())
    assert load_settings(file, [], {}) == settings
    assert load_settings(file, ["reward.routes.nq.name=f1"], {}).reward.routes["nq"][0].name == "f1"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.totl_training_steps=3", "unknown setting 'trainer.totl_training_steps'.*'trainer.total_training_s"),
        ("reward.routes.nq=em", "'reward.routes.nq' is 'em': expected a reward as {name: em}"),
        ("reward.routes.nq=[{name: em, wight: 1}]", "nq.0.wight': did you mean 'reward.routes.nq.0.weight'"),
        ("reward.user.mine={function: a.py:f, timeout: 1}", "mine.timeout': did you mean 'reward.user.mine.timeout_s'"),
        ("reward.routes.nq=[]", "'reward.routes.nq' is .*at least 1 item"),
        ("trainer.engine.fsdp_size=4", "'trainer.engine.fsdp_size' is now 'trainer.engine.args.fsdp_size'"),
        ("rollot.n=3", "unknown setting 'rollot'.*'rollout'"),
        ("rollout.engine.zzz=1", "unknown setting 'rollout.engine.zzz'.*known here: args, dtype"),
        ("rollout.n=many", "'rollout.n' is 'many'.*integer"),
        ("rollout.n=0", "'rollout.n' is 0.*greater than or equal to 1"),
        ("run.id=a/b", "'run.id' is 'a/b'"),
        ("reward.grpc_address=localhost", "'reward.grpc_address' is 'localhost'"),
        ("rollout.weights.transport=nccl", "'rollout.weights.transport' is 'nccl'.*'filesystem'"),
        ("retriever.mode=magic", "'retriever.mode' is 'magic'.*'bm25'"),
        ("run.seed", "'run.seed' is not a setting: write key.key=value"),
        ("run.seed.x=1", "run.seed"),
        ("trainer.actor.entropy_coeff=.nan", "'trainer.actor.entropy_coeff' is nan: Input should be a finite number"),
        ("trainer.actor.optim.lr=.inf", "'trainer.actor.optim.lr' is inf: Input should be a finite number"),
    ],
)
def test_an_invalid_setting_is_one_sentence_with_its_name(override: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as caught:
        load_settings(None, [override], {})
    assert "\n" not in str(caught.value)


def test_a_misspelt_environment_variable_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'run\.sed'.*'run\.seed'"):
        load_settings(None, [], {"FORAGE__RUN__SED": "1"})


@pytest.mark.parametrize(
    ("name", "value", "source"),
    [
        ("FORAGE__REWARD__ROUTES__nqOpen__NAME", "em", "nqOpen"),
        ("FORAGE__REWARD__ROUTES__NQ_OPEN__NAME", "em", "nq_open"),
        ("FORAGE__REWARD__ROUTES", "{NQ: {name: em}}", "NQ"),
    ],
)
def test_a_variable_keeps_the_case_of_a_key(name: str, value: str, source: str) -> None:
    assert load_settings(None, [], {name: value}).reward.routes[source]


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "just words"])
def test_a_file_that_is_no_mapping_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=r"s\.yaml"):
        load_settings(file, [], {})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xfe\xff\x00", "unacceptable character"),
        (b"[" * 1000, "nested too deeply"),
        (b"run: !!timestamp 2024-13-45\n", "month must be in 1..12"),
        (b"run: {seed: " + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b"run: !!timestamp x\n", "a date, number or tag that there is not"),
        (b"run: !!bool x\n", "a date, number or tag that there is not"),
    ],
)
def test_a_file_that_is_no_yaml_is_an_error_that_names_it(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "wrong.yaml").write_bytes(content)
    with pytest.raises(SettingsError, match=rf"wrong\.yaml is not YAML: .*{reason}"):
        load_settings(tmp_path / "wrong.yaml", [], {})


def test_a_value_that_is_a_billion_values_is_shown_in_short(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    (tmp_path / "wrong.yaml").write_text("\n".join([*lines, "run: {seed: *a9}"]))
    with pytest.raises(SettingsError) as error:
        load_settings(tmp_path / "wrong.yaml", [], {})
    assert len(str(error.value)) < 1000


def test_a_missing_file_is_an_error_that_names_it() -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        settings_from_arguments(["--config", "nowhere.yaml"])


def test_the_demo_and_every_shipped_config_are_valid(repository: Path) -> None:
    files = sorted((repository / "configs").glob("*.yaml"))
    assert files
    for file in files:
        assert isinstance(load_settings(file, [], {}), Settings)


@given(st.text(min_size=1, max_size=30))
def test_no_override_raises_anything_but_a_settings_error(text: str) -> None:
    with contextlib.suppress(SettingsError):
        load_settings(None, [text], {})


def test_a_renamed_setting_is_an_error_that_names_the_new_one() -> None:
    with pytest.raises(SettingsError, match=r"'rollout\.attach' is now 'rollout\.use_existing_app'"):
        load_settings(None, ["rollout.attach=true"], {})


def test_a_repeatable_run_refuses_settings_under_which_time_decides() -> None:
    repeatable = ["run.repeatable=true", "trainer.max_staleness=0", "rollout.weights.update=drain"]
    assert load_settings(None, repeatable, {}).run.repeatable
    for broken, sentence in (
        ("trainer.max_staleness=1", "needs trainer.max_staleness=0, not 1: "),
        ("rollout.weights.update=in_flight", "needs rollout.weights.update=drain, not in_flight: "),
        ("trainer.straggler_timeout_s=9", "needs trainer.straggler_timeout_s=0, not 9.0: "),
        ("trainer.algorithm.probe_penalty.coef=0.1", "needs trainer.algorithm.probe_penalty.coef=0, not 0.1: "),
    ):
        with pytest.raises(SettingsError, match=f"^run.repeatable {sentence}"):
            load_settings(None, [*repeatable, broken], {})


def test_a_colocated_run_refuses_what_needs_engines_and_trainer_at_once() -> None:
    colocated = ["trainer.placement=colocated", "trainer.max_staleness=0"]
    assert load_settings(None, colocated, {}).trainer.placement == "colocated"
    for broken, sentence in (
        ("trainer.max_staleness=1", "needs trainer.max_staleness=0, not 1: engines sleep while the trainer computes"),
        ("trainer.validation_mode=overlapped", "needs trainer.validation_mode=paused, not overlapped: "),
        ("trainer.algorithm.probe_penalty.coef=0.1", "needs trainer.algorithm.probe_penalty.coef=0, not 0.1: "),
        ("trainer.ray.address=auto", "needs trainer.ray.address='', not auto: trainer and engines share the GPUs"),
        ("rollout.ray_address=auto", "needs rollout.ray_address='', not auto: "),
        ("rollout.engine.endpoint=http://h/v1", "needs rollout.engine.endpoint='', not http://h/v1: "),
    ):
        with pytest.raises(SettingsError, match=f"^trainer.placement=colocated {sentence}"):
            load_settings(None, [*colocated, broken], {})
