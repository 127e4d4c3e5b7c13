"""Questions under the policy's chat template: those that it rejects are named, and what they hold is text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trainer_parts import build_question

from forage_records.questions import Questions, read_questions
from forage_runtime.errors import DataError
from forage_runtime.settings import Settings
from forage_trainer.chats.chat_tokenizer import ChatTokenizer

STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
)
BROKEN = "{% for m in messages %}{{ 1 + m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    return shutil.copytree(repository / "models/tiny-policy", tmp_path_factory.mktemp("model") / "tiny")


def read(file: Path, *chats: list[dict[str, str]]) -> Questions:
    pq.write_table(pa.Table.from_pylist([build_question(i) | {"prompt": chat} for i, chat in enumerate(chats)]), file)
    return read_questions([file])


@pytest.mark.parametrize(
    ("template", "reason"), [(STRICT, "System role not supported"), (BROKEN, "unsupported operand type")]
)
def test_a_question_that_the_template_rejects_is_named(model: Path, tmp_path: Path, template: str, reason: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    user = {"role": "user", "content": "Who?"}
    questions = read(
        tmp_path / "q.parquet", *[[user]] * (template is STRICT), [{"role": "system", "content": "Do."}, user]
    )
    with pytest.raises(DataError) as error:
        questions.filter_by_length(ChatTokenizer(Settings(model={"path": model})), 100)
    sentence = str(error.value)
    assert (
        f"rejects the question 'world_facts/train/{len(questions.rows) - 1}', whose messages are of system, user"
        in sentence
    )
    assert reason in sentence
    assert "\n" not in sentence


def test_control_tokens_of_a_question_are_measured_as_text(model: Path, tmp_path: Path, repository: Path) -> None:
    shutil.copy(repository / "models/tiny-policy/chat_template.jinja", model)
    tokens = [token["content"] for token in json.loads((model / "tokenizer.json").read_text())["added_tokens"][:3]]
    assert tokens == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = ChatTokenizer(Settings(model={"path": model}))
    (plain,) = tokenizer.count_prompt_tokens([[{"role": "user", "content": "Who? "}]])
    (longer,) = tokenizer.count_prompt_tokens([[{"role": "user", "content": f"Who? {''.join(tokens)}"}]])
    assert longer > plain + len(tokens), "as text each is several tokens"
