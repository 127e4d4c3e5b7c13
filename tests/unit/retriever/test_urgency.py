"""Which requests are searched first, on a clock that the tests set."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_retriever.serve.urgency import HEAD_START_S, PATIENCE_S, Urgency, compute_due
from forage_retriever.serve.waiting import MAX_BATCH, TURN_QUERIES, QueuedSearch, SearchOptions, WaitingRequests

OPTIONS = SearchOptions("dense", 3)


def ask(text: str, tokens: int = 0, timeout_s: float = float("inf"), options: SearchOptions = OPTIONS) -> QueuedSearch:
    return QueuedSearch([text], options, Urgency(tokens, timeout_s))


def take_texts(requests: WaitingRequests[QueuedSearch], now: float) -> list[str]:
    _, batch = requests.take_batch(now)
    return [request.texts[place] for request, place in batch]


def test_a_longer_trajectory_is_due_earlier_by_each_doubling() -> None:
    due = [compute_due(Urgency(tokens), 100.0) for tokens in (0, 256, 768, 1792, 32_512)]
    assert due == [130.0, *(pytest.approx(130.0 - HEAD_START_S * doublings) for doublings in (1, 2, 3, 7))]


def test_a_deadline_that_is_near_is_due_and_a_far_one_changes_nothing() -> None:
    assert compute_due(Urgency(timeout_s=4), 100.0) == 104.0
    assert compute_due(Urgency(timeout_s=300), 100.0) == compute_due(Urgency(), 100.0) == 100.0 + PATIENCE_S


def test_requests_are_taken_by_length_by_deadline_and_else_in_their_order() -> None:
    requests: WaitingRequests[QueuedSearch] = WaitingRequests()
    for request in (ask("first"), ask("second"), ask("long", 5000), ask("longer", 9000), ask("hasty", timeout_s=1)):
        requests.add(request, 50.0)
    assert take_texts(requests, 50.0) == ["longer", "hasty", "long", "first", "second"]
    assert requests.queries == 0


def test_a_short_trajectory_is_served_however_many_long_ones_come() -> None:
    """Two long ones a second at a retriever that answers one a second."""
    requests: WaitingRequests[QueuedSearch] = WaitingRequests()
    requests.add(ask("short", options=OPTIONS._replace(topk=1)), 0.0)
    for second in itertools.count():
        for number in range(2):
            alone = OPTIONS._replace(topk=2 + 2 * second + number)  # so that a batch has one query
            requests.add(ask(f"long {second}/{number}", 16_000, options=alone), second)
        if take_texts(requests, second) == ["short"]:
            break
        assert second < 100
    head_start = 100.0 + PATIENCE_S - compute_due(Urgency(16_000), 100.0)
    assert head_start < second <= 2 * head_start + 1  # those of the seconds of its head start were before it


def test_a_batch_is_that_of_the_first_request_and_takes_no_others_options() -> None:
    requests: WaitingRequests[QueuedSearch] = WaitingRequests()
    other = OPTIONS._replace(topk=9)
    for request in (ask("a"), ask("b", 9000, options=other), ask("c", 700), ask("d", options=other)):
        requests.add(request, 0.0)
    assert take_texts(requests, 0.0) == ["b", "d"]
    assert take_texts(requests, 0.0) == ["c", "a"]


def test_a_large_request_is_due_again_after_each_turn() -> None:
    requests: WaitingRequests[QueuedSearch] = WaitingRequests()
    large = QueuedSearch([f"large {number}" for number in range(3 * TURN_QUERIES)], OPTIONS, Urgency())
    requests.add(large, 0.0)
    requests.add(ask("small"), 0.0)
    batch = take_texts(requests, 20.0)  # the second turn of the large one is due as if it came now
    assert len(batch) == MAX_BATCH
    assert batch[TURN_QUERIES] == "small"


def test_what_is_withdrawn_is_not_taken() -> None:
    requests: WaitingRequests[QueuedSearch] = WaitingRequests()
    gone, stays = ask("gone", 9000), ask("stays")
    for request in (gone, stays):
        requests.add(request, 0.0)
    requests.withdraw(gone)
    assert (requests.queries, take_texts(requests, 0.0), requests.queries) == (1, ["stays"], 0)


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 2), st.integers(0, 9000), st.booleans()), max_size=30))
def test_every_query_is_taken_once_whatever_comes(asked: list[tuple[int, int, int, bool]]) -> None:
    requests: WaitingRequests[QueuedSearch] = WaitingRequests()
    kept, taken = [], []
    for number, (queries, topk, tokens, leaves) in enumerate(asked):
        texts = [f"{number}/{query}" for query in range(queries)]
        request = QueuedSearch(texts, OPTIONS._replace(topk=topk + 1), Urgency(tokens))
        requests.add(request, float(number))
        if leaves:
            requests.withdraw(request)
        else:
            kept += texts
    while requests.queries:
        options, batch = requests.take_batch(99.0)
        assert 0 < len(batch) <= MAX_BATCH
        assert {request.options for request, _ in batch} == {options}
        taken += [request.texts[place] for request, place in batch]
    assert sorted(taken) == sorted(kept)
