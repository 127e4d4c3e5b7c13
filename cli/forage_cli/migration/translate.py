"""Translates settings of verl or Search-R1 into a settings file, with a comment for all that was left out, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args
from urllib.parse import urlsplit

import yaml

from forage_cli.migration.verl_file import VerlFile, is_unresolved
from forage_runtime.errors import SettingsError
from forage_runtime.settings.actor import POLICY_LOSSES
from forage_runtime.settings.loading import check_settings
from forage_runtime.settings.trainer import TrackerName
from forage_runtime.text.yaml_core import CoreDumper
from forage_runtime.verl_keys import Counterpart, find_counterpart

_OF_SEARCH_R1 = ("max_turns", "do_search", "retriever.", "reranker.", "data.max_obs_length", "data.max_start_length")
_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "rollout.n": 1,
    "rollout.max_start_length": 512,
    "rollout.max_response_length": 512,
    "trainer.max_staleness": 0,
    "trainer.algorithm.adv_estimator": "gae",
    "trainer.algorithm.rollout_correction.mode": "none",
    "trainer.actor.clip_ratio": 0.2,
    "trainer.actor.use_kl_loss": False,
}
"""Our setting → the value that verl takes where a file says nothing, and Forage's default is another."""
_SEARCH_R1_DEFAULTS: dict[str, Any] = {
    "rollout.max_start_length": 256,
    "rollout.max_prompt_length": 512,
    "rollout.max_obs_length": 512,
    "rollout.max_turns": 10,
    "trainer.actor.entropy_coeff": 0.001,
    "trainer.algorithm.state_masking": False,
}
_LOSS_ARGS = "trainer.actor.policy_loss.args."
_MINI_BATCH = 256
_MICRO_BATCH_TOKENS = 8192
_LARGEST_DIVISOR = 10**5  # that is looked for: no batch is larger
Outcome: TypeAlias = tuple[dict[str, Any], str]
"""Our settings, and a remark on what was not taken over as it was."""


@dataclass(frozen=True)
class _Given:
    """What a file says; a value that refers to something it does not say is not among `values`."""

    values: Mapping[str, Any]
    is_search_r1: bool

    def count(self, key: str, default: int) -> int:
        value = self.values.get(key, default)
        return value if isinstance(value, int) and value > 0 else default

    @property
    def samples(self) -> int:
        rollout = "actor_rollout_ref.rollout."
        return self.count(f"{rollout}n_agent", self.count(f"{rollout}n", 1))

    @property
    def batch(self) -> int:
        return self.count("data.train_batch_size", _DEFAULTS["data.train_batch_size"])


def translate(file: VerlFile, source: str) -> str:
    """Translate the keys of verl, or of Search-R1, which is recognised by keys that verl lacks.

    Args:
        source: name of the file, for the comment.

    Returns:
        A settings file, with comments.

    Raises:
        SettingsError: a value cannot be taken.
    """
    values = file.values
    is_search_r1 = any(key.startswith(_OF_SEARCH_R1) for key in values)
    settings = _DEFAULTS | (_SEARCH_R1_DEFAULTS if is_search_r1 else {})
    stated = {key: value for key, value in values.items() if value is not None}
    given = _Given({key: value for key, value in stated.items() if not is_unresolved(value)}, is_search_r1)
    left_out: list[str] = []
    for key, value in sorted(stated.items(), key=lambda item: item[0].endswith(".n_agent")):  # it wins over n
        row = find_counterpart(key)
        if row is None:
            left_out.append(f"{key}: Forage has nothing of the kind")
        elif is_unresolved(value):
            remedy = f": give {row.ours}" if row.ours else ""
            left_out.append(f"{key}: it refers to {value}, which the file does not say{remedy}")
        elif not row.is_fixed_at(value):
            converted, remark = _convert(row, key, value, given)
            settings |= converted
            left_out += [f"{key}={value}: {remark}"] if remark else []
    mode = settings.get("trainer.actor.policy_loss.loss_mode", "vanilla")
    for key in [key for key in settings if key.startswith(_LOSS_ARGS)]:
        if (name := key.removeprefix(_LOSS_ARGS)) not in POLICY_LOSSES.get(mode, {}):
            left_out.append(f"{name}={settings.pop(key)}: loss_mode {mode} does not take it")
    check_settings(_build_tree(settings))
    _complete(settings, given)
    tree = _build_tree(settings)
    check_settings(tree)
    comments = [
        f"# Translated from {source} by 'forage config from-verl'. Still to say here: data.corpus or retriever.index,",
        "# reward.routes for each data source, and how GPUs are shared ('forage plan').",
        *_list_under("Left out", left_out),
        *_list_under("Not read", file.unread),
    ]
    return "\n".join([*comments, str(yaml.dump(tree, Dumper=CoreDumper, sort_keys=False))])


def _list_under(title: str, sentences: Sequence[str]) -> list[str]:
    """Comments under a title; lines of a value must not end a comment."""
    items = [f"# - {' '.join(sentence.split())}" for sentence in sentences]
    return ["#", f"# {title}:", *items] if items else []


def _build_tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def _convert(row: Counterpart, key: str, value: Any, given: _Given) -> Outcome:
    if row.is_same:
        return {row.ours: value}, ""
    if not row.convert:
        return {}, row.why
    try:
        converted, remark = _CONVERSIONS[row.convert](value, given, row.ours)
    except (TypeError, ValueError, OverflowError):
        raise SettingsError(f"{key} is {value!r}, which is no value of verl's: mend it, or leave it out") from None
    return converted, remark or ("" if converted else row.why)


def _complete(settings: dict[str, Any], given: _Given) -> None:
    """Add what follows from several keys."""
    if not given.is_search_r1:
        settings.setdefault("rollout.max_turns", 0)  # a response is one generation
        settings["rollout.max_prompt_length"] = settings["rollout.max_start_length"]
    elif not settings["trainer.actor.use_kl_loss"]:
        settings["trainer.algorithm.use_kl_in_reward"] = True  # Search-R1's trainer has it where the loss has none
    settings.setdefault("trainer.actor.clip_ratio_high", settings["trainer.actor.clip_ratio"])
    names = ("start_length", "prompt_length", "response_length", "obs_length", "turns")  # may be texts, such as '500'
    start, prompt, response, observation, turns = (int(settings.get(f"rollout.max_{name}", 192)) for name in names)
    room = prompt + response
    settings.setdefault("rollout.engine.max_model_len", math.ceil(room / 16) * 16)
    longest = start + response * (turns + 1) + turns * observation
    mini_batch, tokens = "trainer.actor.ppo_mini_batch_size", "trainer.actor.ppo_max_token_len_per_gpu"
    if mini_batch not in settings:
        settings |= _mini_batch(min(_MINI_BATCH, given.batch), given, mini_batch)[0]
    settings[tokens] = max(int(settings.get(tokens, _MICRO_BATCH_TOKENS)), longest)


def _prompt_length(value: int, given: _Given, ours: str) -> Outcome:
    return {ours if given.is_search_r1 else "rollout.max_start_length": value}, ""


def _mini_batch(value: float, given: _Given, ours: str) -> Outcome:
    """Prompts; Search-R1's trajectories are divided by the samples of a prompt, up to the next divisor of the batch."""
    wanted, batch = float(value) / (given.samples if given.is_search_r1 else 1), given.batch
    small = [size for size in range(1, min(math.isqrt(batch), _LARGEST_DIVISOR) + 1) if batch % size == 0]
    prompts = min((size for part in small for size in (part, batch // part) if size >= wanted), default=batch)
    return {ours: prompts}, "" if prompts == value else f"{prompts} prompts here, which divide {batch}, the batch"


def _warmup(value: float, given: _Given, ours: str) -> Outcome:
    steps = given.count("trainer.total_training_steps", 0)
    if not steps:
        return {}, "give trainer.total_training_steps, and the steps of the warm-up"
    return {ours: round(float(value) * steps)}, ""


def _address(value: str, given: _Given, ours: str) -> Outcome:
    url = urlsplit(str(value))
    if not url.hostname or not url.port:
        return {}, "give host:port"
    remark = "" if url.path in ("/retrieve", "") else f"the path is /retrieve here, not {url.path}"
    return {ours: f"{url.hostname}:{url.port}"}, remark


def _run_id(value: str, given: _Given, ours: str) -> Outcome:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", str(value)).strip("-_")
    return ({ours: name} if name else {}), "" if name == value else f"the run is called {name} here"


def _trackers(value: Any, given: _Given, ours: str) -> Outcome:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    known = [name for name in names if name in get_args(TrackerName)]
    others = [name for name in names if name not in (*known, "console", "file")]
    return {ours: known}, f"{', '.join(others)} is no tracker here" if others else ""


def _keep_from(least: int) -> Callable[[Any, _Given, str], Outcome]:
    return lambda value, given, ours: ({ours: value} if value >= least else {}, "")


_CONVERSIONS: dict[str, Callable[[Any, _Given, str], Outcome]] = {
    "keep": lambda value, given, ours: ({ours: value}, ""),
    "list": lambda value, given, ours: ({ours: value if isinstance(value, list) else [value]}, ""),
    "prompt_length": _prompt_length,
    "mini_batch": _mini_batch,
    "not_negative": _keep_from(0),
    "positive": _keep_from(1),
    "warmup": _warmup,
    "underscores": lambda value, given, ours: ({ours: str(value).replace("-", "_")}, ""),
    "address": _address,
    "run_id": _run_id,
    "trackers": _trackers,
    "resume": lambda value, given, ours: ({ours: value == "auto"} if value in ("auto", "disable") else {}, ""),
}
