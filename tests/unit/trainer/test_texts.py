"""The trainer puts texts back that the rollout service left out, with the tokenizer of the policy's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from forage_proto.v1.trajectory_pb2 import Role, Span, Trajectory
from forage_runtime.errors import DataError
from forage_trainer.data.texts import TextReader
from forage_trajectory.codec import leave_out_texts

MODEL = Path(__file__).resolve().parents[3] / "models/tiny-policy"


def make_trajectory(text: str) -> Trajectory:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    text = tokenizer.decode(ids, skip_special_tokens=False)
    trajectory = Trajectory(id="r/g/0", token_ids=ids, spans=[Span(role=Role.ROLE_MODEL, end=len(ids), text=text)])
    leave_out_texts(trajectory, lambda own: tokenizer.decode(list(own), skip_special_tokens=False))
    assert not trajectory.spans[0].text
    return trajectory


def test_texts_are_put_back() -> None:
    trajectory = make_trajectory("<|im_start|>Who is it?<|im_end|>")
    TextReader(MODEL).restore([trajectory])
    assert trajectory.spans[0].text == "<|im_start|>Who is it?<|im_end|>"


def test_a_trajectory_of_another_tokenizer_stays_without_its_texts(capsys: pytest.CaptureFixture[str]) -> None:
    trajectory, whole = make_trajectory("Who is it?"), make_trajectory("Who is she?")
    trajectory.token_ids[0] += 1
    TextReader(MODEL).restore([trajectory, whole])
    assert (trajectory.spans[0].text, trajectory.spans[0].implied) == ("", True)
    assert whole.spans[0].text == "Who is she?"
    assert "texts_not_restored" in capsys.readouterr().err


def test_no_tokenizer_is_read_where_no_text_is_missing(tmp_path: Path) -> None:
    whole = Trajectory(token_ids=[1, 2], spans=[Span(role=Role.ROLE_MODEL, end=2, text="a text")])
    TextReader(tmp_path / "none").restore([whole])
    assert whole.spans[0].text == "a text"


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text("{")
    reader = TextReader(tmp_path / "model")
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer"):
        reader._decode([1])
