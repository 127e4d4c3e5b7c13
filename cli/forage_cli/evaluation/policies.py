"""Policies to evaluate: a model folder, a version of a run, a remote endpoint, or the one that is being served."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from forage_records.run_folder import RunFolder
from forage_runtime.errors import DataError, UserError
from forage_runtime.files.model_folder import check_model_folder, read_model_shapes
from forage_runtime.settings import SecuritySettings
from forage_runtime.settings.base import check_url
from forage_runtime.text.redaction import redact_url
from forage_weights.folders import list_published, open_whole
from forage_weights.signed_folder import verify_published

RUNNING = "running"
_NAMED = re.compile(r"([\w.@-]+)=(.+)")
_UNNAMEABLE = re.compile(r"[^\w.@-]")
_VERSION = re.compile(r"(.+)@(latest|best|\d+)")
_FORMS = "a model folder, RUN@latest, RUN@best, RUN@<version>, http(s)://…/v1, or 'running'"
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "**/*.onnx")
"""The last two are of rerankers."""
_INCIDENTAL = ("transformers_version", "_name_or_path")


class Kind(StrEnum):
    """Location of a policy."""

    FOLDER = "folder"
    ENDPOINT = "endpoint"
    RUNNING = "running"


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy of an evaluation.

    Attributes:
        label: name in tables; unique within an evaluation.
        source: the text of --policy.
        folder: weights and tokenizer; None where they are not on this machine.
        url: address of an endpoint.
        run: folder of the run that published it.
        published: the folder as it was named; `folder` is another one where that holds a delta.
        digest: changes with the weights, tokenizer and configuration; of an endpoint, with its address.
    """

    label: str
    kind: Kind
    source: str
    folder: Path | None = None
    url: str = ""
    run: Path | None = None
    published: Path | None = None
    digest: str = ""


def resolve_policy(text: str) -> EvaluatedPolicy:
    """Resolve `[NAME=]SOURCE` of --policy.

    Raises:
        UserError, DataError: there is no such policy; the message names the known forms or versions.
    """
    named = _NAMED.fullmatch(text)
    label, what = (named[1], named[2]) if named else ("", text)
    if what == RUNNING:
        return EvaluatedPolicy(label or RUNNING, Kind.RUNNING, what)
    if what.startswith(("http://", "https://")):
        return _resolve_endpoint(label, what)
    version = _VERSION.fullmatch(what)
    if version:
        run = Path(version[1])
        number, folder = _find_published(run, version[2])
        label = label or f"{run.resolve().name}@{number}"
        whole = open_whole(folder)
        return EvaluatedPolicy(label, Kind.FOLDER, what, whole, "", run, folder, hash_model_folder(whole))
    folder = Path(what)
    if (folder / "settings.yaml").is_file():
        raise UserError(f"--policy {what} is a run: say which version, for instance {what}@latest")
    if not folder.is_dir():
        raise UserError(f"--policy {what} does not exist: give {_FORMS}")
    label = label or _UNNAMEABLE.sub("-", folder.resolve().name)
    whole = open_whole(folder)
    check_model_folder(whole)
    return EvaluatedPolicy(label, Kind.FOLDER, what, whole, published=folder, digest=hash_model_folder(whole))


def verify_signatures(policies: Iterable[EvaluatedPolicy], security: SecuritySettings) -> None:
    """Return if the policies of runs are signed as they must be.

    Raises:
        DataError: one is not, or was changed since.
        SettingsError: a key file is wrong.
    """
    for policy in policies:
        if policy.published is not None and policy.folder is not None:
            verify_published(policy.published, policy.folder, security)


def find_untrained(policies: Sequence[EvaluatedPolicy], given: Path | None) -> EvaluatedPolicy:
    """Return the policy before training: the given folder, else the initial policy of the first run.

    Raises:
        UserError: neither is known.
    """
    run = next((policy.run for policy in policies if policy.run), None)
    folder = given or (RunFolder.open(run).find_model() if run else None)
    if folder is None:
        raise UserError(
            "the baseline 'untrained' needs the policy before training: give --untrained FOLDER "
            "(not needed where a policy is a run's, as in RUN@latest)"
        )
    return replace(resolve_policy(str(folder)), label="untrained")


def check_labels(policies: Iterable[EvaluatedPolicy]) -> tuple[EvaluatedPolicy, ...]:
    """Return the policies after checking that their labels differ.

    Raises:
        UserError: two have the same label.
    """
    seen: dict[str, EvaluatedPolicy] = {}
    for policy in policies:
        if other := seen.get(policy.label):
            raise UserError(
                f"two policies are called {policy.label!r} ({other.source} and {policy.source}): "
                f"give one a name, as in after={policy.source}"
            )
        seen[policy.label] = policy
    return tuple(seen.values())


def group_by_engine(policies: Sequence[EvaluatedPolicy]) -> list[list[EvaluatedPolicy]]:
    """Group policies that one engine can serve in turn without a restart, in the order given."""
    engines: dict[str, list[EvaluatedPolicy]] = {}
    for policy in policies:
        engines.setdefault(_hash_architecture(policy), []).append(policy)
    return list(engines.values())


def hash_model_folder(folder: Path) -> str:
    """Hash weights, configuration, tokenizer and chat template with SHA-256."""
    weights = (file for pattern in _WEIGHTS for file in folder.glob(pattern))
    return _hash_files([*weights, *(folder / name for name in ("config.json", *_TEXTS))])


def hash_tokenizer(folder: Path) -> str:
    """Hash tokenizer and chat template with SHA-256."""
    return _hash_files(folder / name for name in _TEXTS)


def _hash_files(files: Iterable[Path]) -> str:
    """Hash the files that exist, with their names."""
    whole = hashlib.sha256()
    for file in sorted(files):
        if file.is_file():
            with file.open("rb") as stream:
                whole.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()


def _resolve_endpoint(label: str, url: str) -> EvaluatedPolicy:
    url = url.rstrip("/")
    try:
        check_url(url)
    except ValueError as error:
        raise UserError(f"--policy has a URL that is not shown, as it may hold a password: {error}") from None
    if not url.endswith("/v1"):
        raise UserError(f"--policy {url}: an OpenAI-compatible endpoint ends in /v1, for instance {url}/v1")
    found = hashlib.sha256(redact_url(url).encode()).hexdigest()
    host = _UNNAMEABLE.sub("-", urlsplit(url).netloc.rpartition("@")[2])
    return EvaluatedPolicy(label or host, Kind.ENDPOINT, redact_url(url), url=url, digest=found)


def _find_published(run: Path, version: str) -> tuple[int, Path]:
    """Find a version of a run, in the folder of its last epoch."""
    RunFolder.open(run)
    published = list_published(run)
    folders = dict(published)
    wanted = _choose_version(run, version, [number for number, _ in published])
    if wanted not in folders:
        best = " --best" if version == "best" else ""
        there = ", ".join(map(str, sorted(folders))) or "none"
        raise DataError(
            f"{run} does not have the policy {version} (available versions: {there}): export it from a checkpoint "
            f"with 'forage trainer export {run} FOLDER{best}' and give that folder"
        )
    return wanted, folders[wanted]


def _choose_version(run: Path, version: str, there: Sequence[int]) -> int:
    """Choose the version; -1 where nothing is published. there: the versions, the newest last."""
    if version == "latest":
        return there[-1] if there else -1
    if version != "best":
        return int(version)
    try:
        return int((run / "checkpoints" / "best").read_text(encoding="utf-8").strip().removeprefix("step_"))
    except (OSError, ValueError):
        raise DataError(f"{run} names no best checkpoint: a validation names one, see trainer.test_freq") from None


def _hash_architecture(policy: EvaluatedPolicy) -> str:
    """Hash configuration, tokenizer and tensor shapes: an engine can switch between policies with equal hashes."""
    if policy.folder is None:
        return policy.url or policy.kind
    config = json.loads((policy.folder / "config.json").read_text(encoding="utf-8"))
    shapes = {name: shape for name, shape in read_model_shapes(policy.folder).items() if name != "lm_head.weight"}
    texts = [(policy.folder / name).read_bytes() for name in _TEXTS if (policy.folder / name).is_file()]
    kept = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    parts = [json.dumps(kept, sort_keys=True).encode(), json.dumps(shapes, sort_keys=True).encode(), *texts]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
