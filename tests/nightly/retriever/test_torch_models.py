"""Exported encoders and rerankers against the same models on torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forage_retriever.encoders import model_folder
from forage_retriever.encoders.conventions import CONVENTIONS, Convention, Pooling
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.encoders.onnx_encoder import OnnxEncoder
from forage_retriever.encoders.onnx_model import ExportError
from forage_retriever.encoders.torch_encoder import TorchEncoder
from forage_retriever.search import rerank
from forage_retriever.search.rerank import CrossEncoder
from forage_runtime.settings import EncoderPrecision, EncoderSettings, RerankSettings, RetrieverSettings

TEXTS = ["Oslo", "", "the money of Norway, " * 9, "who was the first king of all Norway?", "word " * 400, "å\0 é"]
UNUSUAL = Convention("mine", "question: ", "text: ", Pooling.CLS, normalize=False, max_tokens=30)
PAIRS = ("who is the king of Norway?", ["Harald V", "Oslo is a city. " * 30, "", "Krone"])


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


def write_cross_encoder(folder: Path, labels: int) -> Path:
    """A BERT of two layers that scores pairs; its weights, and so its digest, are the same in every run."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(**shape, max_position_embeddings=64, num_labels=labels, initializer_range=0.2)
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((model_folder.locate_bundled() / "tokenizer.json").read_bytes())
    return folder


def test_fp32_vectors_equal_those_of_sentence_transformers(exact: Encoder) -> None:
    reference = TorchEncoder("minilm", model_folder.locate_bundled(), exact.convention)
    done: list[int] = []
    assert np.abs(exact.encode_queries(TEXTS) - reference.encode_queries(TEXTS)).max() < 1e-5
    assert (
        np.abs(exact.encode_passages(TEXTS, done.append) - reference.encode_passages(TEXTS, done.append)).max() < 1e-5
    )
    assert done == [len(TEXTS)] * 2
    assert exact.family == reference.family
    assert exact.digest != reference.digest


def test_a_convention_is_applied_as_on_torch(tiny: Path, repository: Path) -> None:
    ours = OnnxEncoder("tiny", tiny, UNUSUAL, EncoderPrecision.FP32, repository / ".cache/retriever", threads=1)
    reference = TorchEncoder("tiny", tiny, UNUSUAL)
    assert np.abs(ours.encode_queries(TEXTS) - reference.encode_queries(TEXTS)).max() < 1e-5
    assert np.abs(ours.encode_passages(TEXTS, print) - reference.encode_passages(TEXTS, print)).max() < 1e-5
    assert np.abs(ours.encode_queries(TEXTS) - ours.encode_passages(TEXTS, print)).max() > 1e-3
    assert np.linalg.norm(ours.encode_queries(TEXTS), axis=1).min() > 2


def test_the_digest_covers_precision_convention_and_model(tiny: Path, repository: Path) -> None:
    cache = repository / ".cache/retriever"
    models = [
        OnnxEncoder("tiny", tiny, UNUSUAL, EncoderPrecision.FP32, cache, 1),
        OnnxEncoder("tiny", tiny, UNUSUAL, EncoderPrecision.INT8, cache, 1),
        OnnxEncoder("tiny", tiny, replace(UNUSUAL, max_tokens=29), EncoderPrecision.FP32, cache, 1),
        OnnxEncoder("minilm", model_folder.locate_bundled(), CONVENTIONS["minilm"], EncoderPrecision.FP32, cache, 1),
    ]
    assert len({one.digest for one in models}) == 4
    assert [one.family == models[0].family for one in models] == [True, True, False, False]


def test_a_folder_that_is_no_model_cannot_be_exported(tmp_path: Path) -> None:
    settings = RetrieverSettings(cache_dir=tmp_path / "cache", encoder=EncoderSettings(model=str(tmp_path)))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ExportError, match=r"cannot be exported to ONNX .*set its url instead"):
        create_encoder(settings)
    assert not list((tmp_path / "cache").glob("encoder-*"))


def test_a_cross_encoder_scores_pairs_as_torch_does(tmp_path: Path, repository: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    folder = write_cross_encoder(tmp_path, labels=1)
    asked = RetrieverSettings(
        cache_dir=repository / ".cache/retriever",
        encoder=EncoderSettings(precision=EncoderPrecision.FP32),
        rerank=RerankSettings(model=str(folder)),
    )
    ours = rerank.load_reranker(asked)
    assert isinstance(ours, CrossEncoder)
    query, contents = PAIRS
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")
    inputs = tokenizer(
        [query] * len(contents), contents, padding=True, truncation=True, max_length=64, return_tensors="pt",
        return_token_type_ids=True,
    )  # fmt: skip
    with torch.no_grad():
        wanted = AutoModelForSequenceClassification.from_pretrained(folder).eval()(**inputs).logits[:, 0].numpy()
    assert wanted.std() > 0.1
    assert ours.score_passages(query, contents) == pytest.approx(wanted, abs=1e-4)
    coarse = CrossEncoder(folder, EncoderPrecision.INT8, repository / ".cache/retriever", threads=1)
    assert coarse.score_passages(query, contents) == pytest.approx(wanted, abs=0.2)
    assert coarse.digest != ours.digest


def test_a_model_with_several_scores_is_refused_as_a_reranker(tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path, labels=3)
    with pytest.raises(ExportError, match=r"gives 3 scores, a reranker gives one"):
        rerank.load_reranker(RetrieverSettings(cache_dir=tmp_path / "cache", rerank=RerankSettings(model=str(folder))))
