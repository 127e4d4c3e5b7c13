"""Signs of a collapse in what the policy writes and does, measured on a sample of a batch's trajectories.

A collapsed policy repeats itself, breaks its tags, changes its script, never searches or never stops to search. Each
rate is a mean over trajectories, which all count the same: a single endless loop must not outweigh a whole batch.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from forage_proto.v1.trajectory_pb2 import ActionKind, Status
from forage_records.statistics import mean_known
from forage_records.trajectory_file import count_searches
from forage_runtime.errors import DataError
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.tags import CLOSE, OPEN, Tag
from forage_trainer.data.texts import TextReader
from forage_trajectory.trajectory import Group, Trajectory

MAX_TRAJECTORIES, MAX_TOKENS = 256, 2048
"""At most so many trajectories of a step are measured, of each the last tokens of the policy and the last others."""
NGRAM = 8
_REPLACEMENT = "\ufffd"  # what a tokenizer makes of bytes that are no text
_COMMON = "COMMON"
# Japanese mixes them within a sentence, and unicodedata names them apart.
_SAME_SCRIPT = dict.fromkeys(("CJK", "HIRAGANA", "KATAKANA"), "CJK AND KANA")


@dataclass(frozen=True)
class Behavior:
    """Measures of one trajectory; None where it has nothing to measure.

    repetition_rate: see `measure_repetition`.
    broken_tag_rate: 1 if a turn has no valid action, or tags that do not pair.
    foreign_letter_rate: see `measure_foreign_letters`.
    max_searches_rate: 1 if it has used up its searches.
    """

    repetition_rate: float | None = None
    broken_tag_rate: float | None = None
    foreign_letter_rate: float | None = None
    max_searches_rate: float | None = None


class BehaviorMetrics:
    """Measures the behavior of a run's policy."""

    def __init__(self, settings: Settings) -> None:
        self._max_turns = settings.rollout.max_turns
        self._texts = TextReader(settings.model.path)
        self._is_reported = False

    def measure(self, groups: Sequence[Group]) -> dict[str, float | None]:
        """Measure a sample of the completed trajectories of a batch, the same one whenever it is measured."""
        completed = [t for group in groups for t in group.trajectories if t.status == Status.STATUS_OK]
        tags = {turn.tag for t in completed for turn in t.turns if turn.tag} | {Tag.THINK.value}
        return average(self.measure_trajectory(t, tags) for t in _draw(completed))

    def measure_trajectory(self, trajectory: Trajectory, tags: Collection[str]) -> Behavior:
        """Measure one trajectory.

        Args:
            tags: of the actions that the run's policy takes, and of its thoughts.
        """
        used_up = None
        if self._max_turns > 0 and trajectory.turns:
            used_up = float(count_searches(trajectory.turns) >= self._max_turns)
        invalid = any(turn.action == ActionKind.ACTION_KIND_INVALID for turn in trajectory.turns)
        if not trajectory.counts.whole:  # which of its tokens are the policy's is unknown
            return Behavior(broken_tag_rate=_to_rate(invalid, trajectory), max_searches_rate=used_up)
        turns, others = split_tokens(trajectory)
        repeated = measure_repetition(turns)
        try:
            *texts, given = self._texts.decode([*turns, others])
        except DataError as error:
            if not self._is_reported:
                get_logger().warning("behavior_not_measured", trajectory=trajectory.id, detail=str(error))
            self._is_reported = True  # it would be so for every trajectory of the run
            return Behavior(repeated, _to_rate(invalid, trajectory), None, used_up)
        # A turn whose beginning is not measured may have opened there what it closes.
        is_whole = sum(map(len, turns)) == trajectory.counts.sampled
        unpaired = any(not has_paired_tags(text, tags) for text in (texts if is_whole else texts[1:]))
        foreign = measure_foreign_letters("".join(texts), given)
        return Behavior(repeated, _to_rate(invalid or unpaired, trajectory), foreign, used_up)


def average(measured: Iterable[Behavior]) -> dict[str, float | None]:
    """Average each measure over the trajectories that have it; None where none has it."""
    rows = list(measured)
    return {field.name: mean_known(getattr(row, field.name) for row in rows) for field in fields(Behavior)}


def split_tokens(trajectory: Trajectory) -> tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.int32]]:
    """Split the tokens of a trajectory whose counts are `whole`, at most `MAX_TOKENS` of each side.

    Returns:
        Those of the policy, by turn, and those of prompt and observations.
    """
    ids = trajectory.columns.load().token_ids
    mask, turn_ids = trajectory.read_mask()
    begin = trajectory.prompt_length
    sampled = np.flatnonzero(mask > 0)[-MAX_TOKENS:]
    turns = [ids[begin + sampled[turn_ids[sampled] == turn]] for turn in trajectory.list_turns()]
    others = np.concatenate((ids[:begin], ids[begin:][mask == 0]))[-MAX_TOKENS:]
    return [turn for turn in turns if len(turn)], others


def measure_repetition(turns: Sequence[npt.NDArray[np.int32]], length: int = NGRAM) -> float | None:
    """Compute the share of n-grams of tokens that occurred before in the same turn; None without any n-gram.

    Args:
        turns: token ids of each, (tokens,) int32.
        length: n.
    """
    every = distinct = 0
    for turn in turns:
        content, size = np.ascontiguousarray(turn, np.int32).tobytes(), np.dtype(np.int32).itemsize
        count = max(0, len(turn) - length + 1)
        every += count
        distinct += len({content[at : at + size * length] for at in range(0, size * count, size)})
    return 1 - distinct / every if every else None


def has_paired_tags(text: str, tags: Collection[str]) -> bool:
    """Whether each of these tags of a turn is opened, then closed, and none within another of its kind.

    The first `</think>` may come alone: chat templates open the thought in the prompt. A tag of observations never
    pairs: only environments write them.
    """
    if OPEN[Tag.INFORMATION] in text or CLOSE[Tag.INFORMATION] in text:
        return False
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if opening not in text and closing not in text:
            continue
        before, *blocks = text.split(opening)
        if before.count(closing) > (tag == Tag.THINK) or any(block.count(closing) != 1 for block in blocks):
            return False
    return True


def measure_foreign_letters(text: str, given: str) -> float | None:
    """Compute the share of a text's letters whose script is nowhere in what was given; None without letters.

    Bytes that are no text count as foreign letters. Letters of no script, as in formulas, do not count.
    """
    known = {find_script(character) for character in set(given)}
    letters = foreign = 0
    for character, count in Counter(text).items():
        script = find_script(character)
        if script == _COMMON:
            continue
        letters += count
        foreign += count if script not in known or character == _REPLACEMENT else 0
    return foreign / letters if letters else None


@lru_cache(maxsize=65536)
def find_script(character: str) -> str:
    """Find the script of a character by its Unicode name, which begins with it; `COMMON` for what is not a letter.

    Letters that stand for others (fullwidth, of formulas, of units) belong to no script.
    """
    if character == _REPLACEMENT:
        return "NONE"
    if unicodedata.category(character) not in ("Lu", "Ll", "Lt", "Lo"):
        return _COMMON
    if unicodedata.normalize("NFKC", character) != character:
        return _COMMON
    first = unicodedata.name(character, _COMMON).partition(" ")[0]
    return _SAME_SCRIPT.get(first, first)


def _draw(trajectories: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Draw at most `MAX_TRAJECTORIES`, at equal distances."""
    count = min(len(trajectories), MAX_TRAJECTORIES)
    return (trajectories[number * len(trajectories) // count] for number in range(count))


def _to_rate(is_broken: bool, trajectory: Trajectory) -> float | None:
    return float(is_broken) if trajectory.turns else None
