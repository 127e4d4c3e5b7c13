"""The bundled encoder on ONNX Runtime: precision, and vectors that do not depend on the other texts of a call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_retriever.encoders import onnx_encoder
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.encoders.onnx_model import LENGTH_STEP, TOKEN_BUDGET, group_by_length
from forage_runtime.errors import DataError, UserError
from forage_runtime.settings import EncoderPrecision, EncoderSettings, RetrieverSettings

TEXTS = ["Oslo", "", "the money of Norway, " * 9, "who was the first king of all Norway?", "word " * 400, "å\0 é"]
some_texts = st.lists(st.text(max_size=40) | st.sampled_from([*TEXTS, "half a pair: \ud800"]), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def exact(repository: Path) -> Encoder:
    chosen = EncoderSettings(precision=EncoderPrecision.FP32)
    return create_encoder(RetrieverSettings(cache_dir=repository / ".cache/retriever", encoder=chosen))


def test_int8_stays_near_fp32(exact: Encoder, encoder: Encoder) -> None:
    assert (exact.encode_queries(TEXTS) * encoder.encode_queries(TEXTS)).sum(1).min() > 0.95
    assert exact.family == encoder.family
    assert exact.digest != encoder.digest


@settings(max_examples=10)
@given(texts=some_texts)
def test_the_vector_of_a_text_does_not_depend_on_its_batch(exact: Encoder, encoder: Encoder, texts: list[str]) -> None:
    for one in (exact, encoder):
        together = one.encode_queries(texts)
        assert np.isfinite(together).all()
        assert np.array_equal(together, np.concatenate([one.encode_queries([text]) for text in texts]))


def test_vectors_do_not_depend_on_how_a_corpus_is_split(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_encoder, "_WINDOW", 64)
    texts = [f"{'word ' * (number % 17)}{number}" for number in range(100)]
    done: list[int] = []
    whole = encoder.encode_passages(texts, done.append)
    assert done == [64, 100]
    parts = [encoder.encode_passages(texts[begin : begin + 70], done.append) for begin in (0, 70)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert encoder.encode_queries([]).shape == (0, encoder.dimension)


@given(lengths=st.lists(st.integers(0, 256), max_size=60), most=st.sampled_from([30, 64, 256]))
def test_groups_have_every_row_once_within_budget_and_padding_limits(lengths: list[int], most: int) -> None:
    lengths = [min(length, most) for length in lengths]
    groups = list(group_by_length(lengths, most))
    assert sorted(row for _, rows in groups for row in rows) == list(range(len(lengths)))
    for length, rows in groups:
        assert length <= most
        assert len(rows) * length <= TOKEN_BUDGET
        assert all(lengths[row] <= length < max(lengths[row], 1) + LENGTH_STEP for row in rows)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    settings = RetrieverSettings(cache_dir=tmp_path / "cache", encoder=EncoderSettings(model=str(tmp_path)))
    with pytest.raises(DataError, match=r"lacks config.json: give a folder in Hugging Face's layout"):
        create_encoder(settings)


def test_a_damaged_export_is_named(encoder: Encoder, tmp_path: Path, repository: Path) -> None:
    for folder in (repository / ".cache/retriever").glob("encoder-*"):
        (tmp_path / folder.name).mkdir()
        (tmp_path / folder.name / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(UserError, match=r"encoder-\w+ cannot be read .*delete this folder and start again"):
        create_encoder(RetrieverSettings(cache_dir=tmp_path))
