"""An engine that serves no policy answers no request of the OpenAI routes."""

from __future__ import annotations

import json

import pytest

from forage_rollout.engine.openai import CHATS, OpenAiRoutes
from forage_runtime.settings import Settings


class Refusing:
    llm = None
    out_of_service = "policy version 3 of epoch 1 is loaded afresh"


@pytest.mark.asyncio
async def test_it_says_why_and_that_the_caller_may_try_again() -> None:
    routes = OpenAiRoutes(Refusing(), Settings())
    head, body = [part async for part in routes.forward_openai("POST", CHATS, [], b"{}")]
    assert head == (503, [("content-type", "application/json"), ("retry-after", "1")])
    assert isinstance(body, bytes)
    assert json.loads(body)["error"]["message"] == Refusing.out_of_service
