"""The memory of Redis in chart and compose: maxmemory follows the container's limit, and the recipes fit."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml
from compose_file import resolve_profile
from deployment_tools import REPOSITORY
from helm_chart import find_object, list_containers, list_pods, read_settings, render, render_values

from forage_cli.planning.streams import estimate_stream_memory
from forage_runtime.settings import Settings, load_settings

GIBI = 2**30


def read_maxmemory(objects: tuple[Any, ...]) -> str:
    [(_, pod)] = list_pods(find_object(objects, "StatefulSet", "-redis"))
    [container, *_] = [container for container, is_init in list_containers(pod["spec"]) if not is_init]
    arguments: list[str] = container["args"]
    return arguments[arguments.index("--maxmemory") + 1]


@pytest.mark.parametrize(
    ("limit", "size"),
    [("2Gi", 2 * GIBI), ("512Mi", GIBI // 2), ("1.5G", 1_500_000_000), ("4000000k", 4 * 10**9), (2 * GIBI, 2 * GIBI)],
)
def test_maxmemory_of_the_chart_is_three_quarters_of_the_limit(limit: str | int, size: int) -> None:
    """Otherwise the kernel kills Redis before the alert on its memory fires."""
    assert read_maxmemory(render_values({"redis": {"resources": {"limits": {"memory": limit}}}})) == str(size * 3 // 4)


def test_maxmemory_of_the_chart_can_be_set() -> None:
    assert read_maxmemory(render_values({"redis": {"maxmemory": "100mb"}})) == "100mb"


@pytest.mark.parametrize("name", ["defaults", "local", "gpu-small", "gpu-large"])
def test_every_values_file_watches_the_memory_of_redis(name: str) -> None:
    objects = render(name)
    [(_, pod)] = list_pods(find_object(objects, "StatefulSet", "-redis"))
    assert "exporter" in {container["name"] for container, _ in list_containers(pod["spec"])}
    assert find_object(objects, "ServiceMonitor", "-redis")["spec"]["endpoints"][0]["port"] == "metrics"
    [group] = find_object(objects, "PrometheusRule", "-redis")["spec"]["groups"]
    assert any("redis_memory_max_bytes" in rule["expr"] for rule in group["rules"])


@pytest.mark.parametrize("name", ["local", "gpu-small", "gpu-large"])
def test_the_recipes_of_the_chart_fit(name: str) -> None:
    objects = render(name)
    memory = estimate_stream_memory(Settings.model_validate(yaml.safe_load(read_settings(objects))))
    assert memory.maxmemory < int(read_maxmemory(objects))


def test_maxmemory_of_compose_is_three_quarters_of_the_limit_and_its_recipe_fits() -> None:
    service = resolve_profile("cpu")["services"]["redis"]
    [words] = re.findall(r"--maxmemory (\$.*?mb) ", service["command"][-1].replace("$$", "$"))
    shown = subprocess.check_output(["sh", "-c", f"echo {words}"], text=True).strip()
    limit = int(service["deploy"]["resources"]["limits"]["memory"])
    assert shown == f"{limit * 3 // 4 // 2**20}mb"
    memory = estimate_stream_memory(load_settings(REPOSITORY / "configs/demo.yaml", [], {}))
    assert memory.maxmemory < limit * 3 // 4
