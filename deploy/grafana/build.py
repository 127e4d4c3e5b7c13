"""Generates dashboards/*.json from forage_dashboards; `make dashboards` runs it in a separate environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forage_dashboards import pipeline, redis, retriever, reward, rollout, training
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).resolve().parent / "dashboards"
DASHBOARDS = {
    "training": training.build_dashboard,
    "pipeline": pipeline.build_dashboard,
    "rollout": rollout.build_dashboard,
    "retriever": retriever.build_dashboard,
    "reward": reward.build_dashboard,
    "redis": redis.build_dashboard,
}


def render_dashboard(name: str) -> str:
    """Render dashboards/<name>.json. Fields without a value are left out, so that Grafana's defaults apply."""
    dashboard = json.loads(json.dumps(DASHBOARDS[name](), cls=JSONEncoder))
    return json.dumps(remove_nulls(dashboard), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def remove_nulls(node: Any) -> Any:
    """Remove keys whose value is null, which the SDK's model does not accept."""
    if isinstance(node, dict):
        return {key: remove_nulls(value) for key, value in node.items() if value is not None}
    return [remove_nulls(item) for item in node] if isinstance(node, list) else node


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(render_dashboard(name), encoding="utf-8")
