"""Settings of the retriever: index, search modes, encoder, reranker."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from forage_common.settings.base import Address, Section


class EncoderPrecision(StrEnum):
    INT8 = "int8"
    FP32 = "fp32"


class RetrievalMode(StrEnum):
    """How passages are found."""

    BM25 = "bm25"
    DENSE = "dense"
    HYBRID = "hybrid"


class EncoderSettings(Section):
    model: str = Field("minilm", description="minilm (bundled), or a folder in Hugging Face's layout")
    convention: str = Field(
        "auto", description="prefixes, pooling and length: minilm, e5, bge, …; auto = by the model's name"
    )
    precision: EncoderPrecision = EncoderPrecision.INT8
    url: str = Field("", description="a text-embeddings-inference endpoint that encodes queries instead")
    timeout_s: float = Field(10.0, gt=0, description="of one call to url")


class RerankSettings(Section):
    model: str = Field("", description="folder of a cross-encoder in Hugging Face's layout; empty = none")
    url: str = Field("", description="a text-embeddings-inference endpoint with /rerank; empty = none")
    depth: int = Field(20, ge=1, description="passages a query that are judged again")
    timeout_s: float = Field(10.0, gt=0, description="of one call to url")


class RetrieverSettings(Section):
    http_address: Address = "127.0.0.1:18610"
    grpc_address: Address = "127.0.0.1:18611"
    index: Path | None = Field(
        None, description="an index folder made by `forage index build`; unset = built from data.corpus"
    )
    mode: RetrievalMode = RetrievalMode.HYBRID
    topk: int = Field(3, ge=1, description="passages a query, where the request does not say")
    faiss_factory: str = Field("Flat", description="FAISS index factory string of the dense index")
    filter_fields: tuple[str, ...] = Field((), description="corpus fields that requests may filter by")
    ef_search: int = Field(128, ge=1, description="candidates that an HNSW graph keeps")
    nprobe: int = Field(32, ge=1, description="cells that an IVF index visits")
    refine: int = Field(
        0,
        ge=0,
        description="exact scores for the best refine x topk, where vectors are stored; 0 = by itself",
    )
    rrf_k: int = Field(60, ge=1, description="damping of reciprocal rank fusion")
    bm25_weight: float = Field(2.0, ge=0, description="of the BM25 ranking in hybrid mode")
    dense_weight: float = Field(1.0, ge=0, description="of the dense ranking in hybrid mode")
    title_weight: float = Field(4.0, ge=0, description="of passages whose title is the query, in hybrid mode")
    encoder: EncoderSettings = EncoderSettings()
    rerank: RerankSettings = RerankSettings()
    shards: tuple[Address, ...] = Field(
        (), description="gRPC addresses of retrievers, each with a part of the corpus; this one merges their answers"
    )
    max_waiting: int = Field(8192, ge=1, description="queries in the queue; beyond it 503 with Retry-After")
    queue_timeout_s: float = Field(30.0, gt=0, description="a query that waited longer is given up")
    cache_dir: Path = Field(
        Path(".cache/retriever"), description="built indexes, by digest of what they were built from"
    )
    threads: int = Field(1, ge=1)
