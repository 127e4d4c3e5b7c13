"""Texts that a trajectory's tokens imply: the agent leaves them out, and who shows them decodes the tokens again.

A document's contents come back in the observation that answers its turn: there the part that both have is left out. A
checksum shows a reader whose tokenizer is another one.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from forage_proto.v1.trajectory_pb2 import Document, Role, Span, Trajectory, Turn
from forage_runtime.errors import DataError

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, control tokens included."""
_SHORTEST_QUOTE = 24


def leave_out_texts(trajectory: Trajectory, decode: Decode) -> None:
    """Leave out the texts of spans that their tokens decode to, and what documents and observations both have."""
    for turn, observation in _pair(trajectory):
        _quote_documents(turn, observation.text)
    ids = list(trajectory.token_ids)
    left_out = []
    for span in trajectory.spans:
        if span.text and span.text == decode(ids[span.begin : span.end]):
            left_out.append(span.text)
            span.implied, span.text = True, ""
    if left_out:
        trajectory.implied_crc32 = zlib.crc32("".join(left_out).encode())


def restore_texts(trajectory: Trajectory, decode: Decode) -> None:
    """Put back what `leave_out_texts` left out; a trajectory that has all of its texts stays as it is.

    Raises:
        DataError: the tokenizer decodes another text than the agent's, or a document names what is not there. The
            trajectory is as before.
    """
    if not lacks_texts(trajectory):
        return
    implied = [span for span in trajectory.spans if span.implied]
    ids = list(trajectory.token_ids) if implied else []
    texts = [decode(ids[span.begin : span.end]) for span in implied]
    if zlib.crc32("".join(texts).encode()) != trajectory.implied_crc32:
        raise DataError(
            f"the tokens of trajectory {trajectory.id} decode to another text than in the rollout service: "
            "give trainer and rollout service the same model.path"
        )
    whole = Trajectory()
    whole.CopyFrom(trajectory)
    whole.ClearField("implied_crc32")
    for span, text in zip((span for span in whole.spans if span.implied), texts, strict=True):
        span.text, span.implied = text, False
    for turn, observation in _pair(whole):
        for document in turn.documents:
            if document.HasField("quote"):
                _restore_document(document, observation.text, trajectory.id)
    trajectory.CopyFrom(whole)


def lacks_texts(trajectory: Trajectory) -> bool:
    """Whether `restore_texts` has anything to put back."""
    return trajectory.HasField("implied_crc32") or any(
        document.HasField("quote") for turn in trajectory.turns for document in turn.documents
    )


def _pair(trajectory: Trajectory) -> Iterator[tuple[Turn, Span]]:
    """The turns with documents, each with the observation that answers it."""
    sampled = [place for place, span in enumerate(trajectory.spans) if span.role == Role.ROLE_MODEL]
    for turn, place in zip(trajectory.turns, sampled, strict=False):
        if turn.documents and place + 1 < len(trajectory.spans):
            yield turn, trajectory.spans[place + 1]


def _quote_documents(turn: Turn, observation: str) -> None:
    """Leave out of each document's contents what the observation has of its text, from the beginning."""
    cursor = 0
    for document in turn.documents:
        title, newline, text = document.contents.partition("\n")
        begin = observation.find(text[:_SHORTEST_QUOTE], cursor)
        if len(text) < _SHORTEST_QUOTE or begin < 0:
            continue
        # The end of an observation may be cut off, and tags in it are escaped.
        length = bisect_left(
            range(1, len(text) + 1), True, key=lambda size: not observation.startswith(text[:size], begin)
        )
        cursor = begin + length
        at = len(title) + len(newline)
        document.quote.at, document.quote.begin, document.quote.length = at, begin, length
        document.contents = document.contents[:at] + document.contents[at + length :]


def _restore_document(document: Document, observation: str, id: str) -> None:
    quote, rest = document.quote, document.contents
    quoted = observation[quote.begin : quote.begin + quote.length]
    if quote.at > len(rest) or len(quoted) != quote.length:
        raise DataError(f"a document of trajectory {id} quotes what its observation does not have: it is damaged")
    document.contents = rest[: quote.at] + quoted + rest[quote.at :]
    document.ClearField("quote")
