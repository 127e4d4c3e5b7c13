"""The page Trajectory: one trajectory of a step's file, or of a validation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from statistics import fmean
from typing import Any
from urllib.parse import quote

from google.protobuf.json_format import ParseDict, ParseError

from forage_console.details.token_columns import find_texts, list_columns, round_value
from forage_console.errors import NotFoundError
from forage_console.models.base import Author
from forage_console.models.trajectories import (
    Address,
    Block,
    Component,
    Judgement,
    Passage,
    Piece,
    TimingBar,
    TrajectoryDetail,
    TrajectoryRow,
    TurnDetail,
)
from forage_console.reading.questions import split_record
from forage_console.store.files import DataFile
from forage_console.store.queries import find_rows
from forage_console.store.run_store import UNREADABLE, RunStore
from forage_console.store.values import list_spans, read_line
from forage_proto.v1.trajectory_pb2 import ActionKind, Score, Status, Trajectory, Turn
from forage_records.spans import split_spans
from forage_records.step_file import StepRow, read_step_rows
from forage_runtime.text.answers import is_retrieval_correct, normalize_answer
from forage_runtime.text.enums import name_value


def read_trajectory(store: RunStore, place: str, row: int, model: str | None, trace_url: str) -> TrajectoryDetail:
    """Read one trajectory.

    Raises:
        NotFoundError: there is none.
    """
    file = store.require(place)
    if not 0 <= row < 2**31 or not (found := find_rows(store, 'place = ? AND "row" = ?', [place, row])):
        raise NotFoundError(f"there is no trajectory {row} in {place}: the page Trajectories lists those that exist")
    (detail,) = read_details(store, file, found, model, trace_url)
    return detail


def read_details(
    store: RunStore, file: DataFile, rows: Sequence[TrajectoryRow], model: str | None, trace_url: str
) -> list[TrajectoryDetail]:
    """Read the trajectories of some rows of one file.

    Raises:
        NotFoundError: the file is gone, or damaged.
    """
    try:
        if file.step is None:
            return [_build_validated(store, file, row, trace_url) for row in rows]
        numbers = [row.row for row in rows]
        read = dict(zip(sorted(numbers), read_step_rows(file.path, numbers), strict=True))
        return [_build_trained(store, file, row, read[row.row], model, trace_url) for row in rows]
    except UNREADABLE as error:
        reason = " ".join(str(error).split())[:200]
        raise NotFoundError(f"{file.place} cannot be read ({reason}): it is damaged or was just replaced") from error


def _build_trained(
    store: RunStore, file: DataFile, row: TrajectoryRow, found: StepRow, model: str | None, trace_url: str
) -> TrajectoryDetail:
    own = found.trajectory
    prompt, blocks = split_texts(own)
    neighbours = _find_neighbours(store, row)
    group = find_rows(store, "place = ? AND uid = ?", [row.place, row.uid], "sample")
    return TrajectoryDetail(
        summary=row,
        step_version=found.version,
        prompt=prompt,
        blocks=blocks,
        tokens=list_columns(found, find_texts(store.run, model)),
        turns=[describe_turn(turn, found, row.targets) for turn in own.turns],
        judgement=judge(own.score),
        validation=judge(own.validation_score) if own.validation_score.status != Status.STATUS_UNSPECIFIED else None,
        timings=_read_timings(own),
        temperature=own.sampling.temperature if own.HasField("sampling") else None,
        replica=own.replica,
        trace_id=own.trace_id,
        trace_url=_fill(trace_url, own.trace_id),
        previous=neighbours[0],
        next=neighbours[1],
        group=[Address(place=one.place, row=one.row) for one in group],
        replay=f"forage rollout replay {shlex.quote(str(file.path))} --rescore",
    )


def _build_validated(store: RunStore, file: DataFile, row: TrajectoryRow, trace_url: str) -> TrajectoryDetail:
    ((begin,),) = store.table.query(
        'SELECT line_begin FROM {table}.rows WHERE place = ? AND "row" = ?', [row.place, row.row]
    )
    line = read_line(file.path, begin or 0)
    trace_id = str(line.get("trace_id") or "")
    neighbours = _find_neighbours(store, row)
    group = find_rows(store, "place = ? AND uid = ?", [row.place, row.uid], 'sample, "row"')
    own = _parse_answer(line)
    known = {"status": row.status, "total": row.reward, "detail": own.score.detail or row.reason or ""}
    judgement = judge(own.score).model_copy(update=known)
    return TrajectoryDetail(
        summary=row,
        step_version=None,
        prompt="".join(span["text"] for span in list_spans(line) if span["role"] == Author.PROMPT),
        blocks=split_record(line),
        tokens=None,
        turns=[describe_turn(found, None, row.targets) for found in _parse_turns(line)],
        judgement=judgement,
        validation=Judgement(reward="exact_match", status=row.status, total=row.em, components=[], detail="")
        if row.em is not None
        else None,
        timings=_read_timings(own),
        temperature=0.0,
        replica=own.replica,
        trace_id=trace_id,
        trace_url=_fill(trace_url, trace_id),
        previous=neighbours[0],
        next=neighbours[1],
        group=[Address(place=one.place, row=one.row) for one in group],
        replay="",
    )


def split_texts(own: Trajectory) -> tuple[str, list[Block]]:
    """The prompt's text, and all blocks."""
    blocks = []
    turn = 0
    for span, block in zip(own.spans, split_spans(own.spans), strict=True):
        author = Author(block.role)
        begin, end = span.begin - own.prompt_length, span.end - own.prompt_length
        if author in (Author.PROMPT, Author.OPENING):
            number = 1 if author is Author.OPENING else None
            blocks.append(Block(author=author, begin=None, end=None, turn=number, pieces=_list_pieces(block)))
            continue
        turns = [number for number in own.turn_ids[max(0, begin) : end] if number > 0]
        turn = turns[0] if turns else turn
        blocks.append(Block(author=author, begin=begin, end=end, turn=turn or None, pieces=_list_pieces(block)))
    prompt = "".join(piece.text for block in blocks if block.author is Author.PROMPT for piece in block.pieces)
    return prompt, blocks


def _list_pieces(block: Any) -> list[Piece]:
    return [Piece(text=piece.text, within=piece.within, is_tag=piece.is_tag) for piece in block.pieces]


def describe_turn(turn: Turn, found: StepRow | None, targets: Sequence[str]) -> TurnDetail:
    return TurnDetail(
        index=turn.index,
        action=name_value(ActionKind, turn.action).lower(),
        tag=turn.tag,
        content=turn.content,
        executed=turn.executed,
        passages=[
            Passage(
                id=one.id,
                title=one.contents.partition("\n")[0].strip().strip('"'),
                text=one.contents.partition("\n")[2],
                score=round_value(one.score) or 0.0,
                gold=_is_gold(one.contents, targets),
            )
            for one in turn.documents
        ],
        retrieval_status=name_value(Status, turn.retrieval_status) if turn.retrieval_status else None,
        mode=turn.provenance.mode,
        index_digest=turn.index_digest or turn.provenance.index_digest,
        is_partial=turn.partial_retrieval,
        advantage=_average_turn(turn.index, found),
        context_begin=turn.context_begin,
    )


def _is_gold(text: str, targets: Sequence[str]) -> bool:
    accepted = [target for target in targets if normalize_answer(target)]
    return bool(accepted) and is_retrieval_correct([text], accepted)


def _average_turn(index: int, found: StepRow | None) -> float | None:
    """Mean advantage of a turn's tokens that were trained on."""
    if found is None or found.advantages is None or found.loss_mask is None:
        return None
    tokens = zip(found.advantages, found.loss_mask, found.trajectory.turn_ids, strict=False)
    values = [value for value, one, turn in tokens if one and turn == index]
    return round_value(fmean(values)) if values else None


def judge(score: Score) -> Judgement:
    return Judgement(
        reward=score.reward,
        status=name_value(Status, score.status),
        total=round_value(score.total) if score.status == Status.STATUS_OK else None,
        components=[
            Component(name=one.name, raw=round_value(one.raw) or 0.0, weighted=round_value(one.weighted) or 0.0)
            for one in score.components
        ],
        detail=score.detail,
    )


def _read_timings(own: Trajectory) -> TimingBar | None:
    if not own.HasField("timings"):
        return None
    return TimingBar(**{name: getattr(own.timings, name) for name in TimingBar.model_fields})


def _parse_answer(line: dict[str, Any]) -> Trajectory:
    """Parse what a validation's line says besides the texts; nothing in lines of before, or of another version."""
    score = {"components": line.get("components"), "reward": line.get("reward_name"), "detail": line.get("detail")}
    answer = {"score": score, "timings": line.get("timings"), "replica": line.get("replica")}
    try:
        return ParseDict(answer, Trajectory(), ignore_unknown_fields=True)
    except (ParseError, TypeError, AttributeError):
        return Trajectory()


def _parse_turns(line: dict[str, Any]) -> list[Turn]:
    found = []
    turns = line.get("turns")
    for turn in turns if isinstance(turns, list) else ():
        try:
            found.append(ParseDict(turn, Turn(), ignore_unknown_fields=True))
        except (ParseError, TypeError, AttributeError):
            continue  # of another version
    return found


def _find_neighbours(store: RunStore, row: TrajectoryRow) -> tuple[Address | None, Address | None]:
    ((count,),) = store.table.query("SELECT coalesce(max(rows), 0) FROM {table}.files WHERE place = ?", [row.place])
    before = Address(place=row.place, row=row.row - 1) if row.row > 0 else None
    return before, Address(place=row.place, row=row.row + 1) if row.row + 1 < count else None


def _fill(trace_url: str, trace_id: str) -> str | None:
    # The id is read from a file of the run: it may only fill its place in the address.
    name = quote(trace_id, safe="", errors="replace")
    return trace_url.replace("{trace_id}", name) if trace_url and trace_id else None
