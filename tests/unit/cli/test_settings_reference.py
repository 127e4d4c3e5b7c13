"""Descriptions of settings, and the reference page that is generated from them."""

from __future__ import annotations

import pytest
import settings_doc

from forage_cli.settings_reference import describe_sections, describe_settings, explain_setting
from forage_runtime.errors import SettingsError
from forage_runtime.settings.loading import RENAMED


def test_every_new_name_of_a_renamed_setting_exists() -> None:
    known = {setting.name for setting in describe_settings()}
    assert all({new, new.rpartition(".")[0]} & known for new in RENAMED.values()), "a setting, or a key of a map"
    assert not set(RENAMED) & known


def test_every_setting_and_section_has_a_description() -> None:
    assert len(describe_settings()) > 200
    assert [setting.name for setting in describe_settings() if not setting.description] == []
    assert [section.name for section in describe_sections() if not section.description] == []


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("trainer.max_staleness", "integer ≥ 0, default 1"),
        ("redis.timeout_s", "number > 0, seconds, default 10.0"),
        ("trainer.batching", "strict | ready, default strict"),
        ("trainer.critic.optim.lr", "number > 0, default 1.0e-05"),
        ("retriever.shards", "list of host:port, default []"),
        ("trainer.engine.param_dtype", "bf16 | fp32 or null, default null"),
        ("data.train_files.0.path", "path, required"),
        ("reward.routes.world_facts.params", "map of values, default {}"),
    ],
)
def test_a_setting_is_explained_with_type_unit_and_default(name: str, summary: str) -> None:
    (setting,) = explain_setting(name)
    assert setting.summary == summary


def test_a_section_is_explained_by_its_settings() -> None:
    assert [setting.name for setting in explain_setting("trainer.lora")] == [
        "trainer.lora.lora_rank",
        "trainer.lora.lora_alpha",
        "trainer.lora.target_modules",
    ]


def test_explaining_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'trainer\.max_stalenes'.*'trainer\.max_staleness'"):
        explain_setting("trainer.max_stalenes")


@pytest.mark.parametrize("theirs", ["actor_rollout_ref.actor.optim.lr", "actor.optim.lr"])
def test_a_name_of_verl_is_explained_by_ours(theirs: str) -> None:
    assert [setting.name for setting in explain_setting(theirs)] == ["trainer.actor.optim.lr"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size", "is verl's: "),
        ("trainer.engine.fsdp_size", "is now 'trainer.engine.args.fsdp_size': use the new name"),
    ],
)
def test_a_name_that_is_no_longer_or_not_ours_says_what_to_use(name: str, words: str) -> None:
    with pytest.raises(SettingsError) as error:
        explain_setting(name)
    assert words in str(error.value)


def test_the_reference_page_is_current() -> None:
    page = settings_doc.DOCUMENT.read_text(encoding="utf-8")
    assert page == settings_doc.render_page(), "docs/reference/settings.md: run 'make reference' and commit"
