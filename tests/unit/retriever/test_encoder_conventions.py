"""Conventions of encoders, inferred from name and folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forage_retriever.encoders import conventions, model_folder
from forage_retriever.encoders.conventions import Pooling
from forage_retriever.encoders.factory import create_encoder
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.settings import EncoderSettings, RetrieverSettings


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("intfloat/e5-base-v2", "e5"),
        ("multilingual-e5-large", "e5"),
        ("BAAI/bge-small-en-v1.5", "bge"),
        ("bge-m3", "plain"),
        ("bge-small-zh", "plain"),
        ("sentence-transformers/all-MiniLM-L12-v2", "minilm"),
        ("ms-marco-MiniLM-L6-v2", "plain"),
        ("thenlper/gte-large", "gte"),
        ("facebook/contriever-msmarco", "contriever"),
        ("my-model5-base", "plain"),
    ],
)
def test_a_convention_is_inferred_from_the_model_name(model: str, name: str) -> None:
    assert conventions.infer_from_model(model).name == name


def test_the_model_name_is_read_from_a_hugging_face_cache_path(tmp_path: Path) -> None:
    folder = tmp_path / "models--intfloat--e5-base-v2" / "snapshots" / "1c644c92ad3ba1efdad3f1451a637716616a20e8"
    folder.mkdir(parents=True)
    assert conventions.infer_from_folder(folder).query_prefix == "query: "


def test_sentence_transformers_files_override_the_name_but_not_the_length_limit(tmp_path: Path) -> None:
    folder = tmp_path / "e5-base-of-mine"
    modules = [describe_module("0", "", "Transformer"), describe_module("1", "1_Pooling", "Pooling")]
    _write(folder / "modules.json", modules)
    _write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 8, "pooling_mode_cls_token": True})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 512})
    convention = conventions.infer_from_folder(folder)
    assert (convention.query_prefix, convention.pooling, convention.normalize, convention.max_tokens) == (
        "query: ",
        "cls",
        False,
        256,
    )
    _write(folder / "1_Pooling/config.json", {"embedding_dimension": 8, "pooling_mode": "mean"})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 128})
    _write(folder / "modules.json", [*modules, describe_module("2", "2_Normalize", "Normalize")])
    convention = conventions.infer_from_folder(folder)
    assert (convention.pooling, convention.normalize, convention.max_tokens) == (Pooling.MEAN, True, 128)


@pytest.mark.parametrize(
    ("module", "config", "said"),
    [
        ("Dense", {}, "has the modules Dense"),
        ("Pooling", {"pooling_mode_lasttoken": True}, "asks for pooling_mode_lasttoken"),
        ("Pooling", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "mean and cls are supported"),
        ("Pooling", {"pooling_mode": "max"}, "asks for max"),
    ],
)
def test_unsupported_modules_and_pooling_are_named(
    tmp_path: Path, module: str, config: dict[str, Any], said: str
) -> None:
    _write(tmp_path / "modules.json", [describe_module("0", "", "Transformer"), describe_module("1", "1", module)])
    _write(tmp_path / "1/config.json", config)
    with pytest.raises(DataError, match=said):
        conventions.infer_from_folder(tmp_path)


def test_an_unknown_convention_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'E5': give one of auto, bge, contriever, e5, gte, minilm, plain"):
        create_encoder(RetrieverSettings(encoder=EncoderSettings(convention="E5")))


def test_the_digest_of_a_convention_ignores_its_name() -> None:
    digests = {name: convention.compute_digest() for name, convention in conventions.CONVENTIONS.items()}
    assert digests.pop("plain") == digests["gte"]
    assert len(set(digests.values())) == len(digests)


def test_the_digest_of_a_model_covers_each_of_its_files(tmp_path: Path) -> None:
    _write(tmp_path / "config.json", {})
    _write(tmp_path / "tokenizer.json", {})
    _write(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    for name in ("1.safetensors", "2.safetensors"):
        _write(tmp_path / name, name)
    digests = [model_folder.digest_model(tmp_path)]
    for name in ("config.json", "tokenizer.json", "1.safetensors", "2.safetensors"):
        _write(tmp_path / name, {"other": name})
        digests.append(model_folder.digest_model(tmp_path))
    assert len(set(digests)) == 5
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(DataError, match=r"lacks 2.safetensors"):
        model_folder.digest_model(tmp_path)


def test_max_tokens_is_limited_by_the_model_positions(tmp_path: Path) -> None:
    _write(tmp_path / "config.json", {"max_position_embeddings": 514})
    assert model_folder.limit_max_tokens(tmp_path, 1024) == 514
    _write(tmp_path / "tokenizer_config.json", {"model_max_length": 512})
    assert model_folder.limit_max_tokens(tmp_path, 1024) == 512
    _write(tmp_path / "tokenizer_config.json", {"model_max_length": 1e30})
    assert model_folder.limit_max_tokens(tmp_path, 256) == 256


def describe_module(index: str, path: str, kind: str) -> dict[str, str]:
    return {"idx": index, "name": index, "path": path, "type": f"sentence_transformers.models.{kind}"}


def _write(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))
