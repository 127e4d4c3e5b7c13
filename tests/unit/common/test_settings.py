"""The settings tree: sources, precedence, and errors that name the key and the remedy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import settings_doc
from hypothesis import given
from hypothesis import strategies as st

from forage_common.errors import SettingsError
from forage_common.settings import Settings, load_settings, settings_from_arguments
from forage_common.settings.describe import describe_sections, describe_settings, explain_setting
from forage_common.settings.loading import RENAMED


def test_the_file_then_the_environment_then_the_command_line_win(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("run: {seed: 1}\nrollout: {n: 2, max_turns: 5}\n")
    environ = {"FORAGE__RUN__SEED": "2", "FORAGE__ROLLOUT__N": "3", "PATH": "/bin"}
    settings = load_settings(file, ["run.seed=4"], environ)
    assert (settings.run.seed, settings.rollout.n, settings.rollout.max_turns) == (4, 3, 5)


def test_a_resolved_tree_reads_back_equal(tmp_path: Path) -> None:
    settings = load_settings(None, ["trainer.actor.optim.lr=3e-4", "reward.routes.nq.name=em"], {})
    file = tmp_path / "s.yaml"
    file.write_text(settings.to_yaml())
    assert load_settings(file, [], {}) == settings


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.totl_training_steps=3", "unknown setting 'trainer.totl_training_steps'.*'total_training_steps'"),
        ("rollot.n=3", "unknown setting 'rollot'.*'rollout'"),
        ("rollout.engine.zzz=1", "unknown setting 'rollout.engine.zzz'.*known here: block_size"),
        ("rollout.n=many", "'rollout.n' is 'many'.*integer"),
        ("rollout.n=0", "'rollout.n' is 0.*greater than or equal to 1"),
        ("run.id=a/b", "'run.id' is 'a/b'"),
        ("reward.grpc_address=localhost", "'reward.grpc_address' is 'localhost'"),
        ("retriever.mode=magic", "'retriever.mode' is 'magic'.*'bm25'"),
        ("run.seed", "'run.seed' is not a setting: write key.key=value"),
        ("run.seed.x=1", "run.seed"),
    ],
)
def test_a_bad_setting_is_one_sentence_with_its_name(override: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as caught:
        load_settings(None, [override], {})
    assert "\n" not in str(caught.value)


def test_a_misspelt_environment_variable_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'run\.sed'.*'seed'"):
        load_settings(None, [], {"FORAGE__RUN__SED": "1"})


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "just words"])
def test_a_file_that_is_no_mapping_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=r"s\.yaml"):
        load_settings(file, [], {})


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


def test_every_new_name_of_a_renamed_setting_exists() -> None:
    known = {setting.name for setting in describe_settings()}
    assert set(RENAMED.values()) <= known
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
        ("trainer.partial_groups", "wait | drop, default wait"),
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


def test_the_reference_page_is_current() -> None:
    page = settings_doc.DOCUMENT.read_text(encoding="utf-8")
    assert page == settings_doc.page(), "docs/reference/settings.md: run 'make reference' and commit"
