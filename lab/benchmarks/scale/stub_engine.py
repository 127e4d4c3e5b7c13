"""An engine without a model behind the real wire: tokens come when those of a real one would, and cost nothing.

Import it where Ray's environment is set: it imports Ray.
"""

from __future__ import annotations

import asyncio
import os
import random

from workload import ANSWER_AT, MAX_RESPONSE, draw_length, draw_text

from forage_proto.v1.trajectory_pb2 import Policy, TemplateValues
from forage_queue.streams.client import StreamClient
from forage_rollout.deployments.engine import EngineDeployment
from forage_rollout.deployments.engine_links import open_server
from forage_rollout.deployments.replica import REDIS_TIMEOUT_S, CheckPace, build_process_name, start_process
from forage_rollout.engine.engine_counts import EngineCounts, Meter
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.background import supervise
from forage_runtime.settings import Settings
from forage_runtime.text.chat_template import Chat
from forage_weights.rollout.follower import Follower

TOKEN_VARIABLE = "FORAGE_SCALE_TOKEN_S"
"""Variable with the seconds from one token of a sequence to its next."""
_FIRST_S = 0.08
_THOUGHTS = _QUERIES = 61


class StubEngine:
    """Samples by waiting: at most `max_num_seqs` sequences at once, the others in the order in which they came."""

    dtype, drains, is_asleep, out_of_service, end_of_turn = "float32", False, False, "", "<|im_end|>"
    difference = None

    def __init__(self, settings: Settings) -> None:
        self.serving: Policy | None = None
        self._slots = asyncio.Semaphore(settings.rollout.engine.max_num_seqs)
        self._token_s = float(os.environ[TOKEN_VARIABLE])
        self._codec = codec = FileTokenizer(settings.model.path)
        self._thoughts = [codec.encode(draw_text(f"thought/{i}", 5 * MAX_RESPONSE)) for i in range(_THOUGHTS)]
        self._searches = [
            codec.encode(f"<search>{draw_text(f'query/{number}', 24)}</search>") for number in range(_QUERIES)
        ]
        self._answer = codec.encode("<answer>Ulaanbaatar</answer>")
        chance = random.Random("logprobs")
        self._logprobs = [-chance.expovariate(1.0) for _ in range(MAX_RESPONSE)]
        self._meter = Meter()
        self._running = 0

    @property
    def counts(self) -> EngineCounts:
        counts = self._meter.counts
        counts.requests_running, counts.requests_waiting = self._running, counts.requests_in_flight - self._running
        return counts

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        turns = "".join(f"<|im_start|>{row['role']}\n{row['content']}<|im_end|>\n" for row in messages)
        return RenderedPrompt(self._codec.encode(f"{turns}<|im_start|>assistant\n"))

    async def generate(self, request: GenerationRequest) -> Generation:
        chance = random.Random(request.seed)
        end = self._answer if len(request.token_ids) >= ANSWER_AT else self._searches[chance.randrange(_QUERIES)]
        thought = self._thoughts[chance.randrange(_THOUGHTS)]
        sampled = thought[: max(0, min(draw_length(chance), request.max_tokens) - len(end))] + end
        tokens = len(sampled)
        with self._meter.track_request() as counts:
            async with self._slots:
                self._running += 1
                try:
                    await asyncio.sleep(_FIRST_S + tokens * self._token_s)
                finally:
                    self._running -= 1
            counts.prompt_tokens += len(request.token_ids)
            counts.sampled_tokens += tokens
        serving = self.serving or Policy()
        return Generation(
            sampled,
            self._logprobs[:tokens],
            False,
            [(serving.version, serving.epoch, 0, tokens)],
        )

    async def release(self, affinity: str) -> None:
        """No lease is held."""

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> float:
        self.serving = policy
        return 0.0


class StubDeployment(EngineDeployment):
    """The engine deployment around such an engine."""

    async def __init__(self, settings_json: str) -> None:  # type: ignore[misc]  # Serve awaits it
        start_process()
        settings = Settings.model_validate_json(settings_json)
        self._replica = build_process_name()
        self._check_pace = CheckPace()
        self._engine = StubEngine(settings)  # type: ignore[assignment]
        streams = StreamClient(settings.redis, settings.run.id, REDIS_TIMEOUT_S)
        self._follower = Follower(streams, self._engine, self._replica)
        await self._follower.catch_up()
        self._following = supervise(self._follower.follow(), "follow_policy")
        self._server, self._address = await open_server(self._engine)

    async def check_health(self) -> None:
        await self._check_pace.last()

    async def __del__(self) -> None:
        await self._server.close()
