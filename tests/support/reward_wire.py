"""The gRPC wire of a reward service with certificates and tokens, for its tests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certificates import Issuer

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import RewardSettings, RolloutSettings, Settings, TlsSettings

TOKEN, NEXT, WRONG = "the-secret-of-today", "the-secret-of-tomorrow", "a-secret-of-nobody"
NO_TLS = TlsSettings()
ITEM = reward_pb2.ScoreItem(
    trajectory_id="run/group/0",
    data_source="world_facts",
    spans=[
        trajectory_pb2.Span(role=trajectory_pb2.ROLE_PROMPT, text="Where?\n<|im_start|>assistant\n"),
        trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text="<think>t</think><answer>Oslo</answer></s>"),
    ],
    ground_truth=trajectory_pb2.GroundTruth(targets=["oslo"]),
    end_of_turn="</s>",
)


@dataclass(frozen=True)
class Wire:
    """A service's address, and the folder with its tokens."""

    address: str
    token_file: Path | None

    def make_settings(self, tls: TlsSettings = NO_TLS, token_file: Path | None = None) -> Settings:
        reward = RewardSettings(grpc_address=self.address, auth_token_file=token_file)
        return Settings(reward=reward, tls=tls, rollout=RolloutSettings(score_timeout_s=300.0))

    def score(self, tls: TlsSettings = NO_TLS, token_file: Path | None = None) -> float:
        """Score a trajectory as a rollout replica does."""

        async def run() -> float:
            client = RewardClient(self.make_settings(tls, token_file))
            try:
                (scored,) = await client.score([ITEM])
            finally:
                await client.close()
            return float(scored.score.total)

        return asyncio.run(run())


def tls_of(issuer: Issuer, issued: Any = None, **options: Any) -> TlsSettings:
    return TlsSettings(**issuer.make_settings(issued, **options))


def write_tokens(file: Path, *tokens: str) -> Path:
    file.write_text("\n".join(tokens) + "\n")
    return file
