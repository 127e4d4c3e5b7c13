"""Encoders on ONNX Runtime against torch, and what they promise about single texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_common.errors import DataError, UserError
from forage_common.settings import EncoderPrecision, EncoderSettings, RetrieverSettings
from forage_retriever.encoders import model_folder
from forage_retriever.encoders.conventions import CONVENTIONS, Convention, Pooling
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.encoders.onnx_encoder import OnnxEncoder
from forage_retriever.encoders.onnx_model import LENGTH_STEP, TOKEN_BUDGET, ExportError, group_by_length
from forage_retriever.encoders.torch_encoder import TorchEncoder

TEXTS = ["Oslo", "", "the money of Norway, " * 9, "who was the first king of all Norway?", "word " * 400, "å\0 é"]
UNUSUAL = Convention("mine", "question: ", "text: ", Pooling.CLS, normalize=False, max_tokens=30)
some_texts = st.lists(st.text(max_size=40) | st.sampled_from([*TEXTS, "half a pair: \ud800"]), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def exact(repository: Path) -> Encoder:
    chosen = EncoderSettings(precision=EncoderPrecision.FP32)
    return create_encoder(RetrieverSettings(cache_dir=repository / ".cache/retriever", encoder=chosen))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers; its weights, and so its digest, are the same in every run."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(**shape, max_position_embeddings=30)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((model_folder.locate_bundled() / "tokenizer.json").read_bytes())
    return folder


def test_fp32_gives_what_sentence_transformers_gives(exact: Encoder) -> None:
    reference = TorchEncoder("minilm", model_folder.locate_bundled(), exact.convention)
    done: list[int] = []
    assert np.abs(exact.encode_queries(TEXTS) - reference.encode_queries(TEXTS)).max() < 1e-5
    assert (
        np.abs(exact.encode_passages(TEXTS, done.append) - reference.encode_passages(TEXTS, done.append)).max() < 1e-5
    )
    assert done == [len(TEXTS)] * 2
    assert exact.family == reference.family
    assert exact.digest != reference.digest


def test_int8_stays_near_fp32(exact: Encoder, encoder: Encoder) -> None:
    assert (exact.encode_queries(TEXTS) * encoder.encode_queries(TEXTS)).sum(1).min() > 0.98
    assert exact.family == encoder.family
    assert exact.digest != encoder.digest


@settings(max_examples=25)
@given(texts=some_texts)
def test_a_text_has_one_vector_whatever_is_beside_it(exact: Encoder, encoder: Encoder, texts: list[str]) -> None:
    for one in (exact, encoder):
        together = one.encode_queries(texts)
        assert np.isfinite(together).all()
        assert np.array_equal(together, np.concatenate([one.encode_queries([text]) for text in texts]))


def test_parts_of_a_corpus_have_the_vectors_of_the_whole(encoder: Encoder) -> None:
    texts = [f"{'word ' * (number % 17)}{number}" for number in range(1100)]
    done: list[int] = []
    whole = encoder.encode_passages(texts, done.append)
    assert done == [1024, 1100]
    parts = [encoder.encode_passages(texts[begin : begin + 700], done.append) for begin in (0, 700)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert encoder.encode_queries([]).shape == (0, encoder.dimension)


@given(lengths=st.lists(st.integers(0, 256), max_size=60), most=st.sampled_from([30, 64, 256]))
def test_groups_hold_every_row_once_within_the_budget_and_hardly_padded(lengths: list[int], most: int) -> None:
    lengths = [min(length, most) for length in lengths]
    groups = list(group_by_length(lengths, most))
    assert sorted(row for _, rows in groups for row in rows) == list(range(len(lengths)))
    for length, rows in groups:
        assert length <= most
        assert len(rows) * length <= TOKEN_BUDGET
        assert all(lengths[row] <= length < max(lengths[row], 1) + LENGTH_STEP for row in rows)


def test_a_convention_is_carried_out_as_torch_does(tiny: Path, repository: Path) -> None:
    ours = OnnxEncoder("tiny", tiny, UNUSUAL, EncoderPrecision.FP32, repository / ".cache/retriever", threads=1)
    reference = TorchEncoder("tiny", tiny, UNUSUAL)
    assert np.abs(ours.encode_queries(TEXTS) - reference.encode_queries(TEXTS)).max() < 1e-5
    assert np.abs(ours.encode_passages(TEXTS, print) - reference.encode_passages(TEXTS, print)).max() < 1e-5
    assert np.abs(ours.encode_queries(TEXTS) - ours.encode_passages(TEXTS, print)).max() > 1e-3
    assert np.linalg.norm(ours.encode_queries(TEXTS), axis=1).min() > 2


def test_the_digest_covers_precision_convention_and_model(tiny: Path, repository: Path) -> None:
    cache = repository / ".cache/retriever"
    made = [
        OnnxEncoder("tiny", tiny, UNUSUAL, EncoderPrecision.FP32, cache, 1),
        OnnxEncoder("tiny", tiny, UNUSUAL, EncoderPrecision.INT8, cache, 1),
        OnnxEncoder("tiny", tiny, replace(UNUSUAL, max_tokens=29), EncoderPrecision.FP32, cache, 1),
        OnnxEncoder("minilm", model_folder.locate_bundled(), CONVENTIONS["minilm"], EncoderPrecision.FP32, cache, 1),
    ]
    assert len({one.digest for one in made}) == 4
    assert [one.family == made[0].family for one in made] == [True, True, False, False]


def test_a_folder_that_is_no_encoder_is_named(tmp_path: Path) -> None:
    asked = RetrieverSettings(cache_dir=tmp_path / "cache", encoder=EncoderSettings(model=str(tmp_path)))
    with pytest.raises(DataError, match=r"lacks config.json .*give a folder in Hugging Face's layout"):
        create_encoder(asked)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ExportError, match=r"cannot be exported to ONNX .*set its url instead"):
        create_encoder(asked)
    assert not list((tmp_path / "cache").glob("encoder-*"))


def test_a_damaged_export_is_named(tiny: Path, tmp_path: Path, repository: Path) -> None:
    OnnxEncoder("tiny", tiny, UNUSUAL, EncoderPrecision.FP32, repository / ".cache/retriever", 1)
    for folder in (repository / ".cache/retriever").glob("encoder-*"):
        (tmp_path / folder.name).mkdir()
        (tmp_path / folder.name / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(UserError, match=r"encoder-\w+ cannot be read .*delete this folder and start again"):
        OnnxEncoder("tiny", tiny, UNUSUAL, EncoderPrecision.FP32, tmp_path, 1)
