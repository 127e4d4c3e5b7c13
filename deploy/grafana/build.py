"""Writes dashboards/*.json from forage_dashboards; `make dashboards` runs it in an environment of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forage_dashboards import pipeline, redis, retriever, reward, rollout, training
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).resolve().parent / "dashboards"
DASHBOARDS = {
    "training": training.dashboard,
    "pipeline": pipeline.dashboard,
    "rollout": rollout.dashboard,
    "retriever": retriever.dashboard,
    "reward": reward.dashboard,
    "redis": redis.dashboard,
}


def text(name: str) -> str:
    """What dashboards/<name>.json has to hold. Fields without a value are left out: Grafana has defaults of its own."""
    made = json.loads(json.dumps(DASHBOARDS[name](), cls=JSONEncoder))
    return json.dumps(without_nulls(made), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def without_nulls(node: Any) -> Any:
    """JSON without the keys whose value is null, which the SDK's model does not read."""
    if isinstance(node, dict):
        return {key: without_nulls(value) for key, value in node.items() if value is not None}
    return [without_nulls(item) for item in node] if isinstance(node, list) else node


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")
