"""From a prompt to the token ids with which all of its samples begin."""

from __future__ import annotations

from forage_proto.v1.trajectory_pb2 import Prompt, Purpose, TemplateValues
from forage_rollout.environments.loading import BUILT_IN, EXPECTED
from forage_rollout.loop.generation import Engine, RenderedPrompt
from forage_rollout.loop.tokens import FileTokenizer, escape_message
from forage_rollout.prompt_checks import InvalidPromptError, check_sampling
from forage_runtime.text.chat_template import find_open_thought


class PromptError(ValueError):
    """The prompt itself cannot be run; running it again changes nothing."""


async def encode_prompt(
    prompt: Prompt, codec: FileTokenizer, engine: Engine, template: TemplateValues, endpoint: str = ""
) -> RenderedPrompt:
    """Check a prompt, and have an engine render its chat; waits until there is one.

    Args:
        template: what the chat template gets where the prompt does not say.
        endpoint: `rollout.engine.endpoint`.

    Raises:
        PromptError: it cannot be run.
    """
    if endpoint and prompt.purpose == Purpose.PURPOSE_TRAIN:
        raise PromptError(
            f"purpose is TRAIN: {endpoint} does not serve the policy that is trained: unset rollout.engine.endpoint"
        )
    if not prompt.timeout_s >= 0:
        raise PromptError(f"timeout_s is {prompt.timeout_s}: expected seconds, or 0 for the service's own limit")
    try:
        check_sampling(prompt.sampling)
    except InvalidPromptError as error:
        raise PromptError(str(error)) from None
    if prompt.environment and prompt.environment not in BUILT_IN:
        raise PromptError(f"environment is {prompt.environment!r}: expected {EXPECTED}")
    if prompt.token_ids:
        ids = list(prompt.token_ids)
        if max(ids) >= codec.vocabulary_size:
            raise PromptError(f"token_ids holds {max(ids)}: the policy's tokenizer has {codec.vocabulary_size} tokens")
        return RenderedPrompt(ids, find_open_thought(codec.decode(ids)))
    if not prompt.messages:
        raise PromptError("the prompt has neither messages nor token_ids")
    try:
        chat = [
            {"role": escape_message(codec, m.role), "content": escape_message(codec, m.content)}
            for m in prompt.messages
        ]
        return await engine.render_chat(chat, prompt.template if prompt.HasField("template") else template)
    except ValueError as error:
        raise PromptError(f"the chat template rejects the prompt: {error}") from error
