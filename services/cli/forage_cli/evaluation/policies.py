"""What can be evaluated: a model folder, a version that a run published, a remote endpoint, whatever is served now."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from forage_cli.runs.folder import RunFolder
from forage_common.errors import DataError, UserError
from forage_common.files.model_folder import check_model_folder, read_model_shapes

RUNNING = "running"
_NAMED = re.compile(r"([\w.@-]+)=(.+)")
_UNNAMEABLE = re.compile(r"[^\w.@-]")
_VERSION = re.compile(r"(.+)@(latest|best|\d+)")
_FOLDER = re.compile(r"v(\d+)-e(\d+)")
_FORMS = "a model folder, RUN@latest, RUN@best, RUN@<version>, http(s)://…/v1, or 'running'"
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_INCIDENTAL = ("transformers_version", "_name_or_path")


class Kind(StrEnum):
    """Where a policy is."""

    FOLDER = "folder"
    ENDPOINT = "endpoint"
    RUNNING = "running"


@dataclass(frozen=True)
class EvaluatedPolicy:
    """One row of the tables.

    Attributes:
        label: names it; unique within an evaluation.
        source: as it was asked for.
        folder: of weights and tokenizer; None where it is not on this machine.
        url: of an endpoint.
        run: the run that published it.
        digest: changes with the weights and what else decides the text; of an endpoint, of its address.
    """

    label: str
    kind: Kind
    source: str
    folder: Path | None = None
    url: str = ""
    run: Path | None = None
    digest: str = ""


def resolve_policy(text: str) -> EvaluatedPolicy:
    """The policy that `[NAME=]WHAT` means.

    Raises:
        UserError, DataError: it means none; says which forms there are, or which versions.
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
        folder = _find_published(run, version[2])
        label = label or f"{run.resolve().name}@{_FOLDER.fullmatch(folder.name)[1]}"  # type: ignore[index]
        return EvaluatedPolicy(label, Kind.FOLDER, what, folder, run=run, digest=hash_model_folder(folder))
    folder = Path(what)
    if (folder / "settings.yaml").is_file():
        raise UserError(f"--policy {what} is a run: say which version, for instance {what}@latest")
    if not folder.is_dir():
        raise UserError(f"--policy {what} does not exist: give {_FORMS}")
    check_model_folder(folder)
    label = label or _UNNAMEABLE.sub("-", folder.resolve().name)
    return EvaluatedPolicy(label, Kind.FOLDER, what, folder, digest=hash_model_folder(folder))


def find_untrained(policies: Sequence[EvaluatedPolicy], given: Path | None) -> EvaluatedPolicy:
    """The policy before training: the folder that is given, else that from which the first run was started.

    Raises:
        UserError: neither is known.
    """
    run = next((policy.run for policy in policies if policy.run), None)
    folder = given or (RunFolder.open(run).find_model() if run else None)
    if folder is None:
        raise UserError(
            "the baseline 'untrained' needs the policy before training: give --untrained FOLDER "
            "(it is known by itself where a policy is a run's, as in RUN@latest)"
        )
    return replace(resolve_policy(str(folder)), label="untrained")


def check_labels(policies: Iterable[EvaluatedPolicy]) -> tuple[EvaluatedPolicy, ...]:
    """The policies, each label once.

    Raises:
        UserError: two have one label.
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
    """Policies in the order given, those together that one engine can serve in turn, without a restart."""
    engines: dict[str, list[EvaluatedPolicy]] = {}
    for policy in policies:
        engines.setdefault(_hash_architecture(policy), []).append(policy)
    return list(engines.values())


def hash_model_folder(folder: Path) -> str:
    """SHA-256 over weights, configuration, tokenizer and chat template."""
    whole = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *(folder / name for name in ("config.json", *_TEXTS))]):
        if file.is_file():
            with file.open("rb") as stream:
                whole.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()


def _resolve_endpoint(label: str, url: str) -> EvaluatedPolicy:
    url = url.rstrip("/")
    if not url.endswith("/v1"):
        raise UserError(f"--policy {url}: an OpenAI-compatible endpoint ends in /v1, for instance {url}/v1")
    found = hashlib.sha256(url.encode()).hexdigest()
    return EvaluatedPolicy(label or urlsplit(url).netloc.replace(":", "-"), Kind.ENDPOINT, url, url=url, digest=found)


def _find_published(run: Path, version: str) -> Path:
    RunFolder.open(run)
    folders = {}  # by version, of several epochs the last
    for folder in sorted((run / "policies").glob("v*-e*"), key=_parse_folder_name):
        if _FOLDER.fullmatch(folder.name):
            folders[_parse_folder_name(folder)[1]] = folder
    wanted = _choose_version(run, version, list(folders))
    if wanted not in folders:
        best = " --best" if version == "best" else ""
        there = ", ".join(map(str, sorted(folders))) or "none"
        raise DataError(
            f"{run} has not kept the policy {version} (versions that are there: {there}): write it from a checkpoint "
            f"with 'forage trainer export {run} FOLDER{best}' and give that folder"
        )
    return folders[wanted]


def _choose_version(run: Path, version: str, there: Sequence[int]) -> int | None:
    if version == "latest":
        return there[-1] if there else None
    if version == "best":
        file = run / "checkpoints" / "best"
        try:
            return int(file.read_text().strip().removeprefix("step_"))
        except (OSError, ValueError):
            raise DataError(f"{run} names no best checkpoint: a validation names one, see trainer.test_freq") from None
    return int(version)


def _parse_folder_name(folder: Path) -> tuple[int, int]:
    found = _FOLDER.fullmatch(folder.name)
    return (int(found[2]), int(found[1])) if found else (0, 0)


def _hash_architecture(policy: EvaluatedPolicy) -> str:
    """Equal for policies between which an engine can switch: it keeps configuration, tokenizer and tensor shapes."""
    if policy.folder is None:
        return policy.url or policy.kind
    config = json.loads((policy.folder / "config.json").read_text(encoding="utf-8"))
    shapes = {name: shape for name, shape in read_model_shapes(policy.folder).items() if name != "lm_head.weight"}
    texts = [(policy.folder / name).read_bytes() for name in _TEXTS if (policy.folder / name).is_file()]
    kept = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    parts = [json.dumps(kept, sort_keys=True).encode(), json.dumps(shapes, sort_keys=True).encode(), *texts]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
