"""`python -m forage_reward.serve.shadow_process FD`: scores by the shadow routes.

The first frame holds the settings as YAML. It reports whether they are valid, then answers each item with its scores.
"""

from __future__ import annotations

import os
import signal
import sys

import yaml

from forage_proto.v1 import reward_pb2
from forage_reward.isolation.user_rewards import UserRewards
from forage_reward.registry import REWARDS
from forage_reward.router import RewardRouter
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import configure_logs
from forage_sandbox.child import ParentConnection

NICENESS = 10


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    configure_logs("reward-shadow")
    parent = ParentConnection(int(sys.argv[1]))
    whole = Settings.model_validate(yaml.safe_load(parent.receive() or b""))
    settings = whole.reward
    with parent.report_start():
        user = UserRewards(settings.user, REWARDS, whole.security.user_code)
        router = RewardRouter(settings.shadow_routes, user.rewards)
    while (frame := parent.receive()) is not None:
        parent.send(router.score(reward_pb2.ScoreItem.FromString(frame)).SerializeToString())
    user.close()


if __name__ == "__main__":
    main()
