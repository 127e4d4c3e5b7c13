"""pass@k and majority@k, compared with an enumeration of all choices."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_cli.evaluation.pass_at_k import majority_at_k, pass_at_k, sample_counts


def test_k_takes_powers_of_two_and_the_number_of_samples() -> None:
    assert [sample_counts(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_correct_sample(rights: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rights)))
    every = [any(choice) for choice in combinations(rights, k)]
    assert pass_at_k(sum(rights), len(rights), k) == pytest.approx(fmean(every))


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=9), st.data())
def test_majority_at_k_is_the_mean_over_all_choices(answers: list[str | None], data: st.DataObject) -> None:
    accepted = data.draw(st.sets(st.sampled_from("abc")))
    rights = [answer in accepted for answer in answers]
    k = data.draw(st.integers(1, len(answers)))

    def vote(choice: tuple[str | None, ...]) -> float:
        votes = [answer for answer in choice if answer is not None]
        most = max(map(votes.count, votes), default=0)
        winners = {answer for answer in votes if votes.count(answer) == most}
        return fmean(answer in accepted for answer in winners) if winners else 0.0

    assert majority_at_k(answers, rights, k) == pytest.approx(fmean(map(vote, combinations(answers, k))))


def test_a_correct_minority_does_not_win() -> None:
    answers = ["b", "b", "b", "a", None]
    rights = [False, False, False, True, False]
    assert majority_at_k(answers, rights, 5) == 0.0
    assert majority_at_k(answers, rights, 1) == pytest.approx(0.2)
    assert pass_at_k(1, 5, 5) == 1.0
