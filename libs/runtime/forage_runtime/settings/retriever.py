"""Settings of the retriever: index, search modes, encoder, reranker."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from forage_runtime.settings.base import Address, Device, ModelSource, Section, find_server


class EncoderPrecision(StrEnum):
    AUTO = "auto"
    INT8 = "int8"
    FP16 = "fp16"
    FP32 = "fp32"


class RetrievalMode(StrEnum):
    """How passages are ranked."""

    BM25 = "bm25"
    DENSE = "dense"
    HYBRID = "hybrid"


class EncoderSettings(Section):
    """The model that turns queries and passages into vectors."""

    model: ModelSource = Field(
        "minilm",
        description="minilm (bundled), a model folder in Hugging Face layout, or the URL of a text-embeddings-inference"
        " server",
    )
    convention: str = Field(
        "auto",
        description="Prefixes, pooling and length of a model family: minilm, e5, bge, …; auto: by the model's name",
    )
    precision: EncoderPrecision = Field(
        EncoderPrecision.AUTO,
        description="auto: fp16 on a GPU, int8 on CPUs; int8 computes on CPUs, fp16 on a GPU, fp32 on either",
    )

    @property
    def url(self) -> str:
        """The server that encodes; empty: a model of this machine."""
        return find_server(self.model)


class RerankSettings(Section):
    """The cross-encoder that reorders the best passages."""

    model: ModelSource = Field(
        "",
        description="Folder of a cross-encoder in Hugging Face layout, or the URL of a text-embeddings-inference server"
        " with /rerank; empty: none",
    )
    depth: int = Field(20, ge=1, description="Passages per query that are reranked")

    @property
    def url(self) -> str:
        """The server that reranks; empty: none does."""
        return find_server(self.model)


class RetrieverSettings(Section):
    """The retriever service."""

    http_address: Address = Field("127.0.0.1:18610", description="Address of POST /retrieve, health and metrics")
    grpc_address: Address = Field("127.0.0.1:18611", description="Address of the gRPC API")
    auth_token_file: Path | None = Field(
        None, description="File with the bearer tokens, a line each, one of which callers must send; null: no token"
    )
    index: Path | None = Field(
        None, description="Index folder made by `forage index build`; null: built from data.corpus at start"
    )
    mode: RetrievalMode = Field(RetrievalMode.HYBRID, description="Ranking of requests that do not name a mode")
    topk: int = Field(3, ge=1, description="Passages per query of requests that do not say how many")
    faiss_factory: str = Field("Flat", description="FAISS index factory string of the dense index")
    filter_fields: tuple[str, ...] = Field((), description="Corpus fields by which requests may filter")
    ef_search: int = Field(128, ge=1, description="HNSW: candidates kept during a search (efSearch)")
    nprobe: int = Field(32, ge=1, description="IVF: cells searched per query")
    refine: int = Field(
        0, ge=0, description="Rescore the best refine × topk passages with their stored vectors; 0: automatic, 1: off"
    )
    rrf_k: int = Field(1, ge=1, description="Constant k of reciprocal rank fusion in hybrid mode")
    bm25_weight: float = Field(0.9, ge=0, description="Weight of the BM25 ranking in hybrid mode")
    dense_weight: float = Field(1.0, ge=0, description="Weight of the dense ranking in hybrid mode")
    encoder: EncoderSettings = EncoderSettings()
    rerank: RerankSettings = RerankSettings()
    shards: tuple[Address, ...] = Field(
        (), description="gRPC addresses of retrievers that each hold a part of the corpus, whose results are merged"
    )
    cache_bytes: int = Field(
        64 * 2**20, ge=0, description="Memory of recent results, which repeated queries get at once; 0: none are kept"
    )
    cache_dir: Path = Field(
        Path(".cache/retriever"), description="Folder of built indexes and converted encoders, named by their digest"
    )
    device: Device = Field(
        "auto",
        description="Where vectors are searched and texts encoded; gpu (or cuda): on every GPU that CUDA shows, or the"
        " start fails; auto: there if it works and has room, else on CPUs",
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads of the encoder, the reranker and FAISS, and of builds; 0: as many as the container's"
        " CPU limit, or the machine's CPUs",
    )
