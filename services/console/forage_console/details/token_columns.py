"""The columns of a trajectory's tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from upath import UPath

from forage_console.models.trajectories import TokenColumns
from forage_proto.v1.trajectory_pb2 import Trajectory
from forage_records.step_file import StepRow
from forage_runtime.text.token_texts import TokenTexts

_DIGITS = 5
Column = list[float | None]


def find_texts(run: UPath, model: str | None) -> TokenTexts:
    """Find the texts of the tokens of a run's model.

    Its path may be relative to the folder that the run was started in, which is rarely this process's: what is not here
    is looked for beside the folder of runs, and then among the policies that the run has published.
    """
    places: list[Path | UPath] = [Path(model), run.parent.parent / model] if model else []
    with suppress(OSError):
        places += sorted((run / "policies").glob("v*"), reverse=True)[:2]
    found = next((place for place in places if _has_tokens(place)), Path(model or ""))
    return _load_texts(found)


def _has_tokens(folder: Path | UPath) -> bool:
    with suppress(OSError, ValueError):
        return bool((folder / "tokenizer.json").is_file())
    return False


@lru_cache(maxsize=2)
def _load_texts(model: Path) -> TokenTexts:
    """Load the texts of a model's tokens; those of the last two models stay in memory."""
    return TokenTexts(model)


def list_columns(row: StepRow, texts: TokenTexts) -> TokenColumns:
    """List the values of every token of the response."""
    own = row.trajectory
    written = [one == 1 for one in own.loss_mask]
    trained = [one == 1 for one in row.loss_mask] if row.loss_mask is not None else [False] * len(written)
    ids = list(own.token_ids[own.prompt_length :])
    ours, theirs = row.log_probs, row.engine_log_probs or (list(own.logprobs) or None)
    return TokenColumns(
        text=texts(ids),
        id=ids,
        mask=[int(one) for one in trained],
        turn=[turn if turn > 0 else None for turn in own.turn_ids],
        version=list_versions(own),
        advantage=_select(row.advantages, trained),
        value=_select(row.values, trained),
        returns=_select(row.returns, trained),
        reward=_select(row.token_rewards, trained),
        log_prob=_select(ours, written),
        engine_log_prob=_select(theirs, written),
        reference_log_prob=_select(row.reference_log_probs, written),
        mismatch=_subtract(ours, row.engine_log_probs, written),
        kl=_estimate_kl(ours, row.reference_log_probs, written),
        entropy=_select(row.entropies, written),
    )


def list_versions(own: Trajectory) -> list[int | None]:
    """List the version of the policy that sampled each token; None of observations."""
    found: list[int | None] = [None] * len(own.loss_mask)
    for segment in own.segments:
        for place in range(segment.begin, min(segment.end, len(found))):
            if own.loss_mask[place]:
                found[place] = segment.version
    return found


def round_value(value: float) -> float | None:
    """Round to digits that can be read; None of what is no number."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _select(values: Sequence[float] | None, chosen: Sequence[bool]) -> Column | None:
    if values is None:
        return None
    return [round_value(value) if one else None for value, one in zip(values, chosen, strict=False)]


def _subtract(ours: Sequence[float] | None, theirs: Sequence[float] | None, chosen: Sequence[bool]) -> Column | None:
    if ours is None or theirs is None:
        return None
    return _select([one - other for one, other in zip(ours, theirs, strict=False)], chosen)


def _estimate_kl(ours: Sequence[float] | None, base: Sequence[float] | None, chosen: Sequence[bool]) -> Column | None:
    """The k3 estimate of each token's KL to the reference policy."""
    if ours is None or base is None:
        return None
    ratios = [min(other - one, 50.0) for one, other in zip(ours, base, strict=False)]
    return _select([math.exp(ratio) - ratio - 1 for ratio in ratios], chosen)
