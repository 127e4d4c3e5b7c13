"""Keys of verl and Search-R1 are settings where they mean the same; else the error names ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings, load_settings
from forage_runtime.settings.actor import POLICY_LOSSES
from forage_runtime.settings.loading import _is_setting
from forage_runtime.verl_keys import read_table


@pytest.mark.parametrize("row", sorted({row.ours for row in read_table().values() if row.ours}))
def test_the_table_names_settings_that_there_are(row: str) -> None:
    section: object = Settings()
    name, of_args, argument = row.partition(".args.")
    if name == "trainer.actor.policy_loss" and of_args:
        assert any(argument in known for known in POLICY_LOSSES.values())
    for part in name.split("."):
        section = getattr(section, part)


def test_no_key_of_ours_is_taken_for_one_of_theirs() -> None:
    both = [key for key, row in read_table().items() if _is_setting(key.split(".")) and row.is_same]
    assert [key for key in both if read_table()[key].ours != key] == []


def test_their_keys_are_taken_from_the_command_line_the_environment_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("algorithm: {adv_estimator: rloo}\nactor_rollout_ref: {rollout: {n: 5}}\nmax_turns: 2\n")
    environ = {"FORAGE__CRITIC__OPTIM__LR": "2e-5"}
    settings = load_settings(file, ["actor.optim.lr=1e-6", "data.return_raw_chat=true"], environ)
    assert (settings.trainer.algorithm.adv_estimator, settings.rollout.n, settings.rollout.max_turns) == ("rloo", 5, 2)
    assert (settings.trainer.actor.optim.lr, settings.trainer.critic.optim.lr) == (1e-6, 2e-5)
    assert load_settings(file, ["rollout.n=4"], {}).rollout.n == 4
    assert load_settings(None, ["rollout.n=4", "actor_rollout_ref.rollout.n=6"], {}).rollout.n == 6


def test_sections_that_a_file_names_twice_by_an_alias_are_two(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("actor: &same {optim: {lr: 3e-6}}\ncritic: *same\nreward: {routes: {a.b: {name: em}}}\n")
    settings = load_settings(file, environ={})
    assert settings.trainer.actor.optim.lr == settings.trainer.critic.optim.lr == 3e-6
    assert settings.reward.routes["a.b"][0].name == "em"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "verl's: use 'trainer.actor.ppo_mini_batch_size' (prompts"),
        ("actor_rollout_ref.actor.strategy=fsdp", "verl's: the trainer uses FSDP2; 'forage config from-verl'"),
        ("data.shuffle=false", "verl's: it is always true here: questions are shuffled by run.seed"),
        ("data.return_raw_cha=true", "unknown setting 'data.return_raw_cha': known here"),
    ],
)
def test_another_meaning_is_an_error_that_says_what_to_write(given: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(None, [given], {})
    (line,) = str(error.value).splitlines()
    assert sentence in line


def test_a_value_under_both_names_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("rollout: {n: 3}\nactor_rollout_ref: {rollout: {n: 5}}\n")
    with pytest.raises(SettingsError, match=r"'actor_rollout_ref\.rollout\.n' is 'rollout\.n' here, which is given"):
        load_settings(file, environ={})
