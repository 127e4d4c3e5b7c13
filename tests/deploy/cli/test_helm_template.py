"""The chart renders under both Helms, refuses what cannot work, and hands the services settings that they load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import chart_schema
import pytest
import yaml
from deployment_tools import HELMS, REPOSITORY, helm, packages
from helm_chart import CHART, MATRIX, NEWEST, Object, one, pods, rendered, settings_text, template

from forage_common.settings import Settings, load_settings

RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))


def _values(name: str) -> Mapping[str, Any]:
    values = MATRIX[name]
    return yaml.safe_load(values.read_text()) if isinstance(values, Path) else values


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _at(settings: Settings, path: tuple[str, ...]) -> Any:
    node: Any = settings.model_dump(mode="json")
    for key in path:
        node = node[key]
    return node


@pytest.mark.parametrize("version", HELMS)
def test_lint_finds_nothing(version: str) -> None:
    for values in (CHART / "values.yaml", *(values for values in MATRIX.values() if isinstance(values, Path))):
        command = [str(helm(version)), "lint", "--strict", str(CHART), "--values", str(values)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("name", MATRIX)
def test_both_helms_render_the_same(name: str) -> None:
    """But for the secrets, which are made up."""

    def comparable(version: str) -> list[str]:
        made = [thing for thing in rendered(name, version) if thing["kind"] != "Secret"]
        return sorted(json.dumps(thing, sort_keys=True) for thing in made)

    oldest, newest = (comparable(version) for version in HELMS)
    assert oldest == newest


@pytest.mark.parametrize("name", MATRIX)
def test_services_load_the_settings_that_were_given(name: str, tmp_path: Path) -> None:
    """From the file, and where Ray starts them from the environment, to the same tree."""
    on_ray = _values(name).get("trainer", {}).get("mode") == "rayjob"
    objects = rendered(name)
    file = tmp_path / "settings.yaml"
    file.write_text(settings_text(objects))
    settings = load_settings(file, environ={})
    given = _values(name).get("settings", {})
    file.write_text(json.dumps(given))
    expected = load_settings(file, environ={})
    for path in _leaves(given):
        assert _at(settings, path) == _at(expected, path), path
    for thing in objects:
        if thing["metadata"]["name"].endswith("settings-env"):
            assert load_settings(environ=thing["data"]) == settings
    if on_ray:
        assert (_at(settings, ("trainer", "nnodes")), _at(settings, ("trainer", "ray", "address"))) == (2, "auto")


@pytest.mark.parametrize(
    ("name", "recipe", "changed"),
    [
        ("local", "demo.yaml", {}),
        ("gpu-small", "search_r1_nq_hotpotqa_grpo_3b.yaml", {}),
        ("gpu-large", "search_r1_nq_hotpotqa_grpo_7b.yaml", {"engine_replicas": {"min": 16, "max": 32}}),
    ],
)
def test_values_files_have_the_settings_of_their_recipe(name: str, recipe: str, changed: Object) -> None:
    """Paths aside, which are those of the pods, and what is said to differ."""
    text = (REPOSITORY / "configs" / recipe).read_text()
    expected = yaml.safe_load(text)
    expected["rollout"] |= changed
    path = re.compile(r"^/data/(questions/)?")
    settings = _values(name)["settings"]

    def bare(node: Any, whole: Any) -> Any:
        if isinstance(node, dict):
            return {key: bare(child, whole[key]) for key, child in node.items()}
        if isinstance(node, list):
            return [bare(*pair) for pair in zip(node, whole, strict=True)]
        if isinstance(node, str) and path.match(node):
            return ("data/" if node.startswith("/data/questions/") else "") + path.sub("", node)
        return node

    assert bare(settings, expected) == expected


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_any_recipe_can_be_the_settings(recipe: Path) -> None:
    """As it stands, although Helm's YAML takes the key `n` for a no."""
    settings = "".join(f"  {line}\n" for line in recipe.read_text().splitlines())
    values = "world: {enabled: false}\nsettings:\n" + settings
    command = [str(helm(NEWEST)), "template", "forage", str(CHART), "--values", "-"]
    command += ["--show-only", "templates/config/settings.yaml"]
    done = subprocess.run(command, input=values, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = yaml.safe_load(next(yaml.safe_load_all(done.stdout))["data"]["settings.yaml"])
    assert made["rollout"].get("n") == yaml.safe_load(recipe.read_text())["rollout"].get("n")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"settings": {"trainer": {"max_stalenes": 1}}}, "max_stalenes"),
        ({"settings": {"trainer": {"max_staleness": -1}}}, "max_staleness"),
        ({"retriver": {}}, "retriver"),
        ({"rollout": {"mode": "both"}}, "rollout.mode|rollout/mode"),
        ({"rollout": {"resources": {"limit": {}}}}, "limit"),
        ({"fetch": [{"url": "s3://bucket/x", "path": "../x", "for": ["trainer"]}]}, "path"),
        ({"settings": {"reward": {"grpc_address": "other:1"}}}, "settings.reward.grpc_address is set"),
        ({"settings": {"redis": {"url": "redis://x/0"}}}, "settings.redis.url is set"),
        ({"settings": {"rollout": {"auth_token_file": "/x"}}}, "set rollout.auth.existingSecret"),
        ({"settings": {"rollout": {"ray_address": "auto"}}}, "set rollout.mode"),
        ({"redis": {"external": {"url": "redis://x:6379/0"}}}, "set redis.enabled=false"),
        ({"redis": {"enabled": False}}, "set redis.external.url or redis.external.existingSecret"),
        (
            {"redis": {"enabled": False, "external": {"url": "redis://:secret@x:6379/0"}}},
            "put the whole URL into a Secret",
        ),
        ({"retriever": {"enabled": False}}, "set settings.retriever.http_address"),
        ({"reward": {"enabled": False}}, "set settings.reward.grpc_address"),
        (
            {"rollout": {"gpu": {"count": 1}}, "settings": {"rollout": {"engine": {"tensor_parallel_size": 2}}}},
            "tensor_parallel_size is 2 but a rollout pod has 1 GPUs",
        ),
        (
            {"rollout": {"gpu": {"count": 2}}, "settings": {"rollout": {"engine_replicas": {"max": 4}}}},
            "needs 4 GPUs but a rollout pod has 2",
        ),
        (
            {
                "rollout": {"mode": "rayservice", "gpu": {"count": 2}},
                "settings": {"rollout": {"engine_replicas": {"max": 4}}},
            },
            "needs 4 GPUs but rollout.rayservice.workers.maxReplicas nodes have 2",
        ),
        (
            {"rollout": {"rayservice": {"workers": {"replicas": 3}}}},
            "replicas is 3, expected a number from minReplicas (1) to maxReplicas (1)",
        ),
        ({"rollout": {"mode": "rayservice", "keda": {"enabled": True}}}, "KEDA scales only a Deployment"),
        (
            {
                "redis": {"enabled": False, "external": {"url": "redis://x:6379/0"}},
                "rollout": {"keda": {"enabled": True}},
            },
            "set rollout.keda.prometheusAddress",
        ),
        ({"trainer": {"nodes": 2}}, "set trainer.mode=rayjob"),
        (
            {"trainer": {"mode": "rayjob", "nodes": 2}, "storage": {"shared": {"accessModes": ["ReadWriteOnce"]}}},
            "its nodes share no volume",
        ),
        (
            {"rollout": {"mode": "rayservice"}, "storage": {"shared": {"accessModes": ["ReadWriteOnce"]}}},
            "cannot read the trainer's policies",
        ),
        ({"settings": {"run": {"dir": "/tmp/runs"}}}, "set a folder below /data/"),
        ({"retriever": {"data": {"kind": "claim"}}}, "set retriever.data.existingClaim"),
    ],
    ids=lambda case: case[:40] if isinstance(case, str) else "",
)
def test_values_that_cannot_work_are_refused_with_a_sentence(values: Mapping[str, Any], sentence: str) -> None:
    done = template(values)
    assert done.returncode != 0
    assert re.search(sentence if "|" in sentence else re.escape(sentence), done.stderr), done.stderr


def test_the_schema_is_current_and_knows_exactly_the_values_there_are() -> None:
    assert chart_schema.SCHEMA.read_text() == chart_schema.render_schema(), "run 'make chart-schema' and commit"
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def names(schema: Mapping[str, Any], node: Any, path: str) -> None:
        schema = root["definitions"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema
        if "properties" in schema and schema.get("additionalProperties") is False:
            unset = {"global"} | ({"registry"} if path.endswith("image") else set())
            assert set(schema["properties"]) - unset == set(node) - unset, path
            for key, child in node.items():
                if key != "settings" or path:
                    names(schema["properties"][key], child, f"{path}.{key}".lstrip("."))

    root = chart_schema.generate_schema()
    names(root, values, "")


def test_the_schema_accepts_what_the_settings_accept() -> None:
    sys.path.append(str(packages()))
    import jsonschema

    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    whole = json.loads(json.dumps(Settings().model_dump(mode="json")))
    jsonschema.validate({"settings": whole}, schema)


def test_a_changed_setting_restarts_those_who_read_it() -> None:
    def names(settings: Object) -> dict[str, str]:
        done = template({"settings": settings})
        objects = tuple(filter(None, yaml.load_all(done.stdout, yaml.CSafeLoader)))
        made = {}
        for component in ("retriever", "reward", "rollout"):
            [(_, pod)] = pods(one(objects, "Deployment", component))
            made[component] = pod["metadata"]["annotations"]["checksum/settings"]
        return made | {"trainer": one(objects, "Job")["metadata"]["name"]}

    before = names({})
    changed = {
        "trainer": ({"trainer": {"actor": {"optim": {"lr": 1e-5}}}}, {"trainer"}),
        "rollout": ({"rollout": {"temperature": 0.7}}, {"rollout", "trainer"}),
        "reward": ({"reward": {"workers": 2}}, {"reward", "rollout", "trainer"}),
        "retriever": ({"retriever": {"topk": 5}}, {"retriever", "rollout", "trainer"}),
        "tracing": ({"tracing": {"enabled": True}}, {"retriever", "reward", "rollout", "trainer"}),
    }
    for settings, restarted in changed.values():
        after = names(settings)
        assert {name for name in after if after[name] != before[name]} == restarted
