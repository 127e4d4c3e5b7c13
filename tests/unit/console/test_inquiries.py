"""Questions whose answers come late: no look waits for them, none is asked twice, and the next look has the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from limits import WAIT_S

from forage_console.live.inquiries import Inquiries, Inquiry


class Service:
    """Answers a question once it is let to. asked: how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = threading.Event()

    def answer(self) -> str:
        self.asked += 1
        self.may_answer.wait(WAIT_S)
        return f"answer {self.asked}"


def test_a_late_answer_is_for_the_next_look() -> None:
    now, service = [0.0], Service()
    inquiries = Inquiries[str](lambda: now[0])
    first = inquiries.begin("a", service.answer)
    now[0] = 3.2
    assert inquiries.read(first) == 3.2
    assert inquiries.begin("a", service.answer) is first, "it is not asked again"
    service.may_answer.set()
    assert first.over.wait(WAIT_S)
    second = inquiries.begin("a", service.answer)
    assert second is first
    assert inquiries.read(second) == "answer 1"
    third = ask(inquiries, service.answer)
    assert (inquiries.read(third), third.before) == ("answer 2", "answer 1")


def test_an_old_answer_tells_nothing_of_now() -> None:
    now, service = [0.0], Service()
    inquiries = Inquiries[str](lambda: now[0])
    service.may_answer.set()
    ask(inquiries, service.answer)
    now[0] = 60.0
    later = ask(inquiries, service.answer)
    assert (inquiries.read(later), later.before) == ("answer 2", None)


def test_a_question_that_failed_is_asked_again() -> None:
    def fail() -> str:
        raise ValueError

    inquiries = Inquiries[str](lambda: 0.0)
    first = ask(inquiries, fail)
    assert inquiries.read(first) == 0.0
    assert inquiries.read(ask(inquiries, lambda: "well")) == "well"


def ask(inquiries: Inquiries[str], answer: Callable[[], str]) -> Inquiry[str]:
    one = inquiries.begin("a", answer)
    assert one.over.wait(WAIT_S)
    return one
