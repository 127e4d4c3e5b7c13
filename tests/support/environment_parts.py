"""Agents over a scripted engine, and an environment of one's own."""

from __future__ import annotations

from typing import Any

from rollout_backend import OneDocumentRetriever, OnePointReward
from scripted_engine import ScriptedEngine

from forage_proto.v1.trajectory_pb2 import ChatMessage, Prompt, Purpose, Trajectory
from forage_rollout.agent import Agent
from forage_runtime.settings import EngineSettings, EnvironmentRoute, RolloutSettings, Settings
from forage_runtime.settings.security import SecuritySettings

SIZES = {"max_start_length": 500, "max_prompt_length": 5000, "max_obs_length": 500, "max_response_length": 200}
CASINO = """
from dataclasses import dataclass
from forage_rollout.environments import Action, Budget, Environment, Episode, Observation

@dataclass
class Dice:
    sides: int

class Casino(Environment):
    tags = ("roll", "answer")
    feedback = "roll or answer"

    def __init__(self, settings, retriever, sides=6):
        super().__init__(settings, retriever)
        self.dice = Dice(sides)
        self.max_turns = 5

    def budget(self, episode):
        return Budget(30, min_tokens=2) if episode.turn == 1 else Budget(9999)

    async def respond(self, action, episode):
        episode.state["rolls"] = episode.state.get("rolls", 0) + 1
        return Observation(f"{action.content} of {self.dice.sides}: {episode.state['rolls']}</dice>",
                           opening="<dice>", closing="</dice>", succeeded=action.content != "bad")
"""


def build_settings(user_code: Any = "auto", **environments: EnvironmentRoute) -> Settings:
    """Settings with these routes; `user_code` "off": environments of one's own run in this process."""
    rollout = RolloutSettings(**SIZES, environments=environments, engine=EngineSettings(max_model_len=9999))
    return Settings(rollout=rollout, security=SecuritySettings(user_code=user_code))


def build_agent(settings: Settings, engine: ScriptedEngine) -> Agent:
    return Agent(settings, engine, OneDocumentRetriever(), OnePointReward(), engine.codec, "<end>", "replica-1")


async def run(
    settings: Settings,
    engine: ScriptedEngine,
    source: str = "own",
    samples: int = 1,
    purpose: Purpose.ValueType = Purpose.PURPOSE_ASK,
) -> list[Trajectory]:
    prompt = Prompt(
        run_id="r",
        group_uid="g",
        data_source=source,
        samples=samples,
        purpose=purpose,
        messages=[ChatMessage(role="user", content="Q")],
    )
    agent = build_agent(settings, engine)
    group = await agent.run_group(prompt)
    await agent.close()
    return list(group.trajectories)
