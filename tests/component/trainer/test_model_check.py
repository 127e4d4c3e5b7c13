"""`forage model check` over the tiny policy, and over folders whose templates do what those of 2026 do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from forage_runtime.errors import DataError
from forage_runtime.settings import Settings
from forage_trainer.model_check.__main__ import app, list_facts
from forage_trainer.weights.completeness import check_complete

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
BEGIN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
THINKER = (  # opens the thought, leaves earlier ones out of the history, strips the assistant's text
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content.split('</think>')[-1].strip() if m.role == 'assistant' else m.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<think>\n' if enable_thinking is not defined or enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)
DATED = (  # writes the date, takes no system message and no two messages of one role in a row
    "{{ 'Today: ' + strftime_now('%Y-%m-%d') + '\n' }}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + BEGIN
)
FORGETFUL = (  # drops system messages and those of tools in silence, and begins with a text that is no thought
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\nMy steps:\n' }}{% endif %}"
)


def make_folder(tmp_path: Path, repository: Path, template: str) -> Path:
    folder = shutil.copytree(repository / "models/tiny-policy", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def check(folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(app, [str(folder), "--json", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    facts = json.loads(result.stdout[result.stdout.index("[") :])
    return result.exit_code, {fact["topic"]: fact for fact in facts}


def test_the_tiny_policy_needs_no_setting_and_is_trained_on_what_it_sampled(repository: Path) -> None:
    code, facts = check(repository / "models/tiny-policy")
    assert code == 0
    assert {fact["level"] for fact in facts.values()} == {"ok"}
    assert "tokens of three turns are trained on, and they are those that were sampled" in facts["rows"]["seen"]


def test_a_template_that_opens_the_thought(tmp_path: Path, repository: Path) -> None:
    folder = make_folder(tmp_path, repository, THINKER)
    code, facts = check(folder, "--no-rows")
    assert code == 0
    assert "'<think>\\n'" in facts["opening"]["seen"]
    assert "given, not sampled" in facts["opening"]["done"]
    assert facts["earlier thoughts"]["seen"] == "left out of the history of a chat"
    assert "stripped" in facts["white space"]["seen"]
    assert "differs from what was sampled" in facts["chats"]["seen"]
    assert facts["thinking"]["seen"] == "enable_thinking=false changes the prompt"
    assert facts["rows"]["level"] == "note"
    _, facts = check(folder, "--no-rows", "data.apply_chat_template_kwargs={enable_thinking: false}")
    assert "ends with a closed thought" in facts["opening"]["seen"]
    assert "format" not in facts


def test_a_template_with_a_date_that_refuses_roles(tmp_path: Path, repository: Path) -> None:
    code, facts = check(make_folder(tmp_path, repository, DATED), "--no-rows", "data.template_date=2026-11-28")
    assert code == 1
    assert "2026-11-28" in facts["date"]["done"]
    for topic in ("system message", "two user messages in a row"):
        assert facts[topic]["level"] == "warning"
        assert facts[topic]["seen"] == "refused (roles must alternate)"
    assert facts["tool message"]["level"] == "note", "no search trajectory has one"


def test_a_template_that_drops_roles_and_begins_with_a_text(tmp_path: Path, repository: Path) -> None:
    code, facts = check(make_folder(tmp_path, repository, FORGETFUL), "data.apply_chat_template_kwargs={thinking: 1}")
    assert code == 1
    assert facts["system message"]["seen"] == facts["tool message"]["seen"] == "dropped in silence"
    assert "'My steps:\\n'" in facts["opening"]["seen"]
    assert "no trajectory can have the format of search_r1_format" in facts["format"]["seen"]
    assert "never reads thinking" in facts["variables"]["seen"]
    assert facts["rows"]["level"] == "ok"


def test_a_template_in_a_file_takes_the_place_of_the_folders(tmp_path: Path, repository: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(THINKER)
    _, facts = check(repository / "models/tiny-policy", "--no-rows", "--template", str(file))
    assert "'<think>\\n'" in facts["opening"]["seen"]


def test_what_cannot_be_checked_is_said_in_a_sentence(tmp_path: Path, repository: Path) -> None:
    settings = Settings(data={"template_date": "2026-11-28"})
    broken = make_folder(tmp_path, repository, "{{ raise_exception('no chats') }}")
    with pytest.raises(DataError, match=r"does not render a question \(no chats\)"):
        list_facts(broken, settings)
    with pytest.raises(DataError, match="its tokenizer cannot be loaded"):
        list_facts(tmp_path / "nothing", settings)
    with pytest.raises(DataError, match=r"--template .* cannot be read"):
        list_facts(broken, settings, tmp_path / "nothing.jinja")


def test_rows_with_other_positions_are_found(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: here every token has the first position."""
    from forage_trainer.model_check import token_facts

    build = token_facts.Layout.build_inputs
    monkeypatch.setattr(
        token_facts.Layout, "build_inputs", lambda self, ids: build(self, ids) | {"position_ids": self.arrange(ids) * 0}
    )
    settings = Settings(data={"template_date": "2026-11-28"})
    (fact,) = [fact for fact in list_facts(repository / "models/tiny-policy", settings) if fact.topic == "rows"]
    assert fact.level == "warning"
    assert "differ by" in fact.seen


def test_a_folder_without_all_tensors_is_refused_and_named(tmp_path: Path, repository: Path) -> None:
    folder = shutil.copytree(repository / "models/tiny-policy", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, facts = check(folder)
    assert code == 1
    assert "1 tensors are missing (model.layers.0.mlp.down_proj.weight)" in facts["weights"]["seen"]
    with pytest.raises(DataError, match=r"is not the whole model: .*down_proj.*model\.norm\.weight"):
        check_complete(folder)
    check_complete(repository / "models/tiny-policy")
    check_complete(tmp_path)  # no model: others say so
