"""Reranking: by a cross-encoder as torch computes it, by an endpoint, and when the judge is away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tei_server import Server, serving

from forage_common.errors import SettingsError
from forage_common.settings import EncoderPrecision, EncoderSettings, RerankSettings, RetrieverSettings
from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders import model_folder
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.encoders.onnx_model import ExportError
from forage_retriever.hits import Filters, Hit
from forage_retriever.search import rerank
from forage_retriever.search.rerank import FAILURES, CrossEncoder, RemoteReranker, RerankedSearcher

PAIRS = ("who is the king of Norway?", ["Harald V", "Oslo is a city. " * 30, "", "Krone"])


class InFileOrder:
    """Gives the first passages of the corpus, for any query; none for an empty one."""

    def __init__(self, corpus: Corpus) -> None:
        self.count = len(corpus)
        self.asked: list[tuple[int, Filters]] = []

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        self.asked.append((topk, filters))
        return [[Hit(row, 1 - row / 10) for row in range(min(topk, self.count))] if query else [] for query in queries]


def cross_encoder(folder: Path, labels: int) -> Path:
    """A BERT of two layers that judges pairs; its weights, and so its digest, are the same in every run."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(**shape, max_position_embeddings=64, num_labels=labels, initializer_range=0.2)
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((model_folder.locate_bundled() / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture
def server(encoder: Encoder) -> Iterator[Server]:
    def by_meaning(query: str, texts: Sequence[str]) -> list[float]:
        vectors = encoder.encode_queries([query, *texts])
        return [float(score) for score in vectors[1:] @ vectors[0]]

    with serving(encoder, by_meaning) as server:
        yield server


def test_a_cross_encoder_scores_pairs_as_torch_does(tmp_path: Path, repository: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    folder = cross_encoder(tmp_path, labels=1)
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


@pytest.mark.slow
def test_a_model_with_several_scores_is_no_reranker(tmp_path: Path) -> None:
    folder = cross_encoder(tmp_path, labels=3)
    with pytest.raises(ExportError, match=r"gives 3 scores, a reranker gives one"):
        rerank.load_reranker(RetrieverSettings(cache_dir=tmp_path / "cache", rerank=RerankSettings(model=str(folder))))


def test_settings_name_one_reranker_or_none() -> None:
    assert rerank.load_reranker(RetrieverSettings()) is None
    with pytest.raises(SettingsError, match=r"both a model and a url"):
        rerank.load_reranker(RetrieverSettings(rerank=RerankSettings(model="m", url="http://127.0.0.1:1")))


def test_an_endpoint_puts_the_best_hits_in_order_and_leaves_the_others_below(texts: Corpus, server: Server) -> None:
    searcher = InFileOrder(texts)
    judge = rerank.load_reranker(RetrieverSettings(rerank=RerankSettings(url=server.url)))
    assert isinstance(judge, RemoteReranker)
    reranked = RerankedSearcher(searcher, texts, judge, depth=4)
    filters = (("lang", ("nb",)),)
    best, nothing = reranked.search(["a town in Sri Lanka", ""], 2, filters)
    assert [texts.ids[hit.row] for hit in best] == ["k", "7"]
    assert nothing == []
    assert searcher.asked == [(4, filters)]
    (deep,) = reranked.search(["a town in Sri Lanka"], 6)
    assert deep[:2] == best
    assert [hit.row for hit in deep[4:]] == [4, 5]
    assert sorted(hit.row for hit in deep) == list(range(6))
    scores = [hit.score for hit in deep]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("failure", [500, 200, 0])
def test_a_judge_that_fails_leaves_hits_as_they_were_and_is_counted(
    texts: Corpus, server: Server, failure: int
) -> None:
    reranked = RerankedSearcher(InFileOrder(texts), texts, RemoteReranker(server.url, timeout_s=0.3), depth=4)
    server.failures = [failure] * 50
    before = FAILURES._value.get()
    found = reranked.search(["a town in Sri Lanka", "", "Norwegian money"], 3)
    assert [[hit.row for hit in hits] for hits in found] == [[0, 1, 2], [], [0, 1, 2]]
    assert FAILURES._value.get() == before + 2
    server.failures = []
    assert np.isfinite([hit.score for hit in found[0]]).all()
