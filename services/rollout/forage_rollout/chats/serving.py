"""vLLM's chat completions, with the tokens of replies that a client sends back as text; see `memory`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from forage_rollout.chats.memory import ChatMemory, Recalled

HEADER = "forage-history"
"""Of a reply to a chat: whether its history has the tokens that were sampled; see `Recalled`."""
recalled: ContextVar[list[Recalled]] = ContextVar("recalled")
"""Where a request's history is reported; whoever answers a request sets a list of its own."""


def build_chat_class(memory: ChatMemory) -> type:
    """A subclass of vLLM's `OpenAIServingChat` over a memory."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    class ExactChat(OpenAIServingChat):  # type: ignore[misc]
        async def render_chat_request(self, request: Any) -> Any:
            result = await super().render_chat_request(request)
            if isinstance(result, ErrorResponse):
                return result
            conversation, inputs = result
            for one in inputs:
                if one["type"] == "token" and (found := memory.recall(conversation, one["prompt_token_ids"])):
                    one["prompt_token_ids"] = found.token_ids
                    recalled.get().append(found)
            return result

        def chat_completion_stream_generator(
            self, request: Any, outputs: Any, id: Any, model: Any, conversation: Any, *rest: Any, **named: Any
        ) -> Any:
            outputs = _remember_replies(memory, request, conversation, outputs)
            return super().chat_completion_stream_generator(request, outputs, id, model, conversation, *rest, **named)

        async def chat_completion_full_generator(
            self, request: Any, outputs: Any, id: Any, model: Any, conversation: Any, *rest: Any, **named: Any
        ) -> Any:
            outputs = _remember_replies(memory, request, conversation, outputs)
            return await super().chat_completion_full_generator(
                request, outputs, id, model, conversation, *rest, **named
            )

    return ExactChat


async def _remember_replies(
    memory: ChatMemory, request: Any, conversation: list[Any], outputs: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """Pass vLLM's outputs on, and remember what was sampled, also of a client that leaves before the end."""
    prompt: list[int] = []
    replies: defaultdict[int, tuple[list[int], list[str]]] = defaultdict(lambda: ([], []))
    try:
        async with aclosing(outputs):
            async for output in outputs:
                prompt = output.prompt_token_ids or prompt
                for choice in output.outputs:  # each part of a choice comes once, whether streamed or not
                    ids, texts = replies[choice.index]
                    ids += choice.token_ids
                    texts.append(choice.text)
                yield output
    finally:
        history, begun = list(conversation), ""
        if request.continue_final_message and history:
            begun = str(history.pop().get("content") or "")
        for ids, texts in replies.values():
            if not request.use_beam_search and prompt and ids:
                memory.remember(history, prompt, ids, begun + "".join(texts))
