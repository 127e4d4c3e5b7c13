"""The chart renders with both versions of Helm, refuses invalid values, and gives services settings that they load."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import chart_schema
import pytest
import yaml
from deployment_tools import HELMS, REPOSITORY, find_helm, find_packages
from helm_chart import (
    CHART,
    MATRIX,
    NEWEST_HELM,
    Object,
    find_object,
    list_pods,
    read_settings,
    render,
    render_values,
    run_template,
)
from typer.testing import CliRunner

from forage_cli.main import app
from forage_runtime.settings import Settings, load_settings

RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))


def _load_values(name: str) -> Mapping[str, Any]:
    values = MATRIX[name]
    return yaml.safe_load(values.read_text()) if isinstance(values, Path) else values


def _list_leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _list_leaves(value, (*path, key))
        else:
            yield (*path, key)


def _get(settings: Settings, path: tuple[str, ...]) -> Any:
    node: Any = settings.model_dump(mode="json")
    for key in path:
        node = node[key]
    return node


@pytest.mark.parametrize("version", HELMS)
def test_helm_lint_reports_nothing(version: str) -> None:
    for values in (CHART / "values.yaml", *(values for values in MATRIX.values() if isinstance(values, Path))):
        command = [str(find_helm(version)), "lint", "--strict", str(CHART), "--values", str(values)]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout
        assert "[WARNING]" not in ended.stdout


@pytest.mark.parametrize("name", MATRIX)
def test_both_versions_of_helm_render_the_same(name: str) -> None:
    """Except Secrets, whose values are random."""

    def render_comparable(version: str) -> list[str]:
        objects = [item for item in render(name, version) if item["kind"] != "Secret"]
        return sorted(json.dumps(item, sort_keys=True) for item in objects)

    oldest, newest = (render_comparable(version) for version in HELMS)
    assert oldest == newest


@pytest.mark.parametrize("name", MATRIX)
def test_services_load_the_settings_of_the_values(name: str, tmp_path: Path) -> None:
    """The settings file, and the environment for processes that Ray starts, give the same settings."""
    uses_ray = _load_values(name).get("trainer", {}).get("mode") == "rayjob"
    objects = render(name)
    file = tmp_path / "settings.yaml"
    file.write_text(read_settings(objects))
    settings = load_settings(file, environ={})
    given = _load_values(name).get("settings", {})
    file.write_text(json.dumps(given))
    expected = load_settings(file, environ={})
    for path in _list_leaves(given):
        assert _get(settings, path) == _get(expected, path), path
    for item in objects:
        if item["metadata"]["name"].endswith("settings-env"):
            assert load_settings(environ=item["data"]) == settings
    if uses_ray:
        assert (_get(settings, ("trainer", "nnodes")), _get(settings, ("trainer", "ray", "address"))) == (2, "auto")


@pytest.mark.parametrize(
    ("name", "recipe", "changed"),
    [
        ("local", "demo.yaml", {}),
        ("gpu-small", "search_r1_nq_hotpotqa_grpo_3b.yaml", {}),
        ("gpu-large", "search_r1_nq_hotpotqa_grpo_7b.yaml", {"engine_replicas": {"min": 16, "max": 32}}),
    ],
)
def test_values_files_have_the_settings_of_their_recipe(name: str, recipe: str, changed: Object) -> None:
    """Except paths, which are those in the pods, the retriever's threads, which follow its CPUs, and `changed`."""
    text = (REPOSITORY / "configs" / recipe).read_text()
    expected = yaml.safe_load(text)
    expected["rollout"] |= changed
    del expected["retriever"]["threads"]
    path = re.compile(r"^/data/(questions/)?")
    settings = _load_values(name)["settings"]

    def strip_paths(node: Any, whole: Any) -> Any:
        if isinstance(node, dict):
            return {key: strip_paths(child, whole[key]) for key, child in node.items()}
        if isinstance(node, list):
            return [strip_paths(*pair) for pair in zip(node, whole, strict=True)]
        if isinstance(node, str) and path.match(node):
            return ("data/" if node.startswith("/data/questions/") else "") + path.sub("", node)
        return node

    assert strip_paths(settings, expected) == expected


def test_the_notes_have_the_command_that_plans_the_release(tmp_path: Path) -> None:
    notes = _read_notes(CHART / "values-gpu-small.yaml", "--set", "image.registry=r", "--set", "rollout.replicas=2")
    (line,) = [line.strip() for line in notes.splitlines() if "forage plan" in line]
    config = tmp_path / "settings.yaml"
    config.write_text(read_settings(render("gpu-small")))
    arguments = shlex.split(line.replace("KIND", "H100").replace("settings.yaml", str(config)))[1:]
    planned = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert (planned["trainer"]["gpus"], planned["rollout"]["gpus"], planned["fits"]) == (4, 8, True)


def _read_notes(values: Path, *options: str) -> str:
    command = [str(find_helm(NEWEST_HELM)), "install", "x", str(CHART), "--dry-run=client", "-f", "-", *options]
    text = values.read_text().replace("CHANGE-ME", "bucket")
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.partition("NOTES:")[2]


def test_without_a_prometheus_operator_the_notes_say_what_is_left_out() -> None:
    assert "no Prometheus operator" in _read_notes(CHART / "values-gpu-small.yaml")
    operator = ["--api-versions", "monitoring.coreos.com/v1"]
    command = [str(find_helm(NEWEST_HELM)), "template", "x", str(CHART)]
    for options, expected in (([], False), (operator, True)):
        rendered = subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout
        assert ("apiVersion: monitoring.coreos.com" in rendered) is expected


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_is_accepted_as_settings(recipe: Path) -> None:
    """Unchanged, although `n` means false in Helm's YAML 1.1; but for those that share GPUs, which no pods can."""
    indented = "".join(f"  {line}\n" for line in recipe.read_text().splitlines())
    values = "world: {enabled: false}\nsettings:\n" + indented
    command = [str(find_helm(NEWEST_HELM)), "template", "forage", str(CHART), "--values", "-"]
    command += ["--show-only", "templates/config/settings.yaml"]
    ended = subprocess.run(command, input=values, capture_output=True, text=True)
    if yaml.safe_load(recipe.read_text())["trainer"].get("placement") == "colocated":
        assert "leave it separate" in ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    settings_file = yaml.safe_load(next(yaml.safe_load_all(ended.stdout))["data"]["settings.yaml"])
    assert settings_file["rollout"].get("n") == yaml.safe_load(recipe.read_text())["rollout"].get("n")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"settings": {"trainer": {"max_stalenes": 1}}}, "max_stalenes"),
        ({"settings": {"trainer": {"max_staleness": -1}}}, "max_staleness"),
        ({"retriver": {}}, "retriver"),
        ({"rollout": {"mode": "both"}}, "rollout.mode|rollout/mode"),
        ({"rollout": {"resources": {"limit": {}}}}, "limit"),
        ({"fetch": [{"url": "s3://CHANGE-ME/x", "path": "x", "for": ["trainer"]}]}, "in place of CHANGE-ME"),
        ({"fetch": [{"url": "s3://bucket/x", "path": "../x", "for": ["trainer"]}]}, "path"),
        ({"settings": {"reward": {"grpc_address": "other:1"}}}, "settings.reward.grpc_address is set"),
        ({"settings": {"redis": {"url": "redis://x/0"}}}, "settings.redis.url is set"),
        ({"settings": {"rollout": {"auth_token_file": "/x"}}}, "set rollout.auth.existingSecret"),
        ({"settings": {"console": {"auth_token_file": "/x"}}}, "set console.auth.existingSecret"),
        ({"settings": {"reward": {"auth_token_file": "/x"}}}, "set reward.auth.existingSecret"),
        ({"settings": {"tls": {"ca": "/x"}}}, "set tls.enabled and tls.certManager or tls.existingSecret"),
        ({"tls": {"enabled": True}}, "tls.enabled is true and nothing gives certificates"),
        ({"tls": {"requireClientCert": True}}, "set tls.enabled too"),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "name the Issuer or ClusterIssuer"),
        (
            {"tls": {"enabled": True, "existingSecret": "x", "certManager": {"enabled": True}}},
            "choose one of them",
        ),
        ({"settings": {"security": {"signing_key_file": "/x"}}}, "set signing.existingSecret"),
        ({"console": {"ingress": {"enabled": True}}}, "enable the console too"),
        ({"console": {"enabled": True, "ingress": {"enabled": True}}}, "set it to the name that browsers use"),
        (
            {"console": {"enabled": True, "ingress": {"enabled": True, "host": "forage.example"}}},
            "set networkPolicy.clients.console",
        ),
        ({"settings": {"rollout": {"ray_address": "auto"}}}, "set rollout.mode"),
        ({"redis": {"external": {"url": "redis://x:6379/0"}}}, "set redis.enabled=false"),
        ({"redis": {"enabled": False}}, "set redis.external.url, and redis.external.existingSecret"),
        (
            {"redis": {"enabled": False, "external": {"url": "redis://:secret@x:6379/0"}}},
            "put the passwords of forage redis acl into a Secret",
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
        ({"settings": {"trainer": {"placement": "colocated"}}}, "leave it separate"),
        ({"retriever": {"data": {"kind": "claim"}}}, "set retriever.data.existingClaim"),
    ],
    ids=lambda case: case[:40] if isinstance(case, str) else "",
)
def test_invalid_values_are_refused_with_a_clear_message(values: Mapping[str, Any], message: str) -> None:
    ended = run_template(values)
    assert ended.returncode != 0
    assert re.search(message if "|" in message else re.escape(message), ended.stderr), ended.stderr


@pytest.mark.parametrize(("given", "there"), [
    ({}, "/app/models/tiny-policy"),
    ({"path": "models/tiny-countdown"}, "/app/models/tiny-countdown"),
    ({"path": "models/Qwen2.5-3B"}, "models/Qwen2.5-3B"),
])  # fmt: skip
def test_the_models_of_the_images_are_found_and_others_on_the_volume(given: Object, there: str) -> None:
    objects = render_values({"settings": {"model": given}})
    assert yaml.safe_load(read_settings(objects))["model"]["path"] == there
    images = (REPOSITORY / "services/Dockerfile").read_text()
    assert "WORKDIR /app\n" in images
    assert images.count("COPY models models\n") == 2
    for item in objects:
        for _, pod in list_pods(item):
            for container in pod["spec"]["containers"]:
                mounts = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
                reads = {"/data", "/etc/forage/settings"} <= mounts
                assert container.get("workingDir") == ("/data" if reads else None), container["name"]


def test_the_schema_is_up_to_date_and_has_exactly_the_names_of_the_values() -> None:
    assert chart_schema.SCHEMA.read_text() == chart_schema.render_schema(), "run 'make chart-schema' and commit"
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare_names(schema: Mapping[str, Any], node: Any, path: str) -> None:
        schema = root["definitions"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema
        if "properties" in schema and schema.get("additionalProperties") is False:
            unset = {"global"} | ({"registry"} if path.endswith("image") else set())
            assert set(schema["properties"]) - unset == set(node) - unset, path
            for key, child in node.items():
                if key != "settings" or path:
                    compare_names(schema["properties"][key], child, f"{path}.{key}".lstrip("."))

    root = chart_schema.generate_schema()
    compare_names(root, values, "")


def test_the_schema_accepts_the_default_settings() -> None:
    sys.path.append(str(find_packages()))
    import jsonschema

    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    defaults = json.loads(json.dumps(Settings().model_dump(mode="json")))
    jsonschema.validate({"settings": defaults}, schema)


def test_a_changed_setting_restarts_the_components_that_read_it() -> None:
    def read_checksums(settings: Object) -> dict[str, str]:
        objects = render_values({"settings": settings}) if settings else render("defaults")
        checksums = {}
        for component in ("retriever", "reward", "rollout"):
            [(_, pod)] = list_pods(find_object(objects, "Deployment", component))
            checksums[component] = pod["metadata"]["annotations"]["checksum/settings"]
        return checksums | {"trainer": find_object(objects, "Job")["metadata"]["name"]}

    before = read_checksums({})
    changed = {
        "trainer": ({"trainer": {"actor": {"optim": {"lr": 1e-5}}}}, {"trainer"}),
        "rollout": ({"rollout": {"temperature": 0.7}}, {"rollout", "trainer"}),
        "reward": ({"reward": {"workers": 2}}, {"reward"}),
        "routes": ({"reward": {"routes": {"mine": {"name": "em"}}}}, {"reward", "rollout", "trainer"}),
        "retriever": ({"retriever": {"topk": 5}}, {"retriever"}),
        "tracing": ({"tracing": {"enabled": True}}, {"retriever", "reward", "rollout", "trainer"}),
        "console": ({"console": {"trace_url": "https://tempo.example/{trace_id}"}}, set()),
    }
    for settings, restarted in changed.values():
        after = read_checksums(settings)
        assert {name for name in after if after[name] != before[name]} == restarted


def test_callers_of_retriever_and_reward_read_no_other_settings_of_theirs() -> None:
    """Than those whose change restarts the callers: _settings.tpl."""
    template = (CHART / "templates/_settings.tpl").read_text()
    for section, variables in {"retriever": r"settings\.retriever|own", "reward": r"settings\.reward"}.items():
        [names] = re.findall(
            rf'set \$settings "{section}" \(pick \(default dict \$settings.{section}\) ([^)]+)\)', template
        )
        folders = [REPOSITORY / "services/rollout", REPOSITORY / "services/trainer", REPOSITORY / "libs"]
        files = [
            file for folder in folders for file in folder.rglob("*.py") if "forage_runtime/settings/" not in str(file)
        ]
        client = REPOSITORY / "libs/runtime/forage_runtime/clients/retriever.py"
        read = {
            name
            for file in files
            for name in re.findall(
                rf"\b(?:{variables if file == client else variables.partition('|')[0]})\.([a-z_]+)", file.read_text()
            )
        }
        assert read
        assert read <= set(shlex.split(names)), section


PAGES = sorted(
    page
    for page in (REPOSITORY / "docs/operate").glob("*.md")
    if "deploy/helm/forage" in page.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_chart_accepts_the_commands_of_the_pages(page: Path, tmp_path: Path) -> None:
    """Those that make a values file are run; those that install or upgrade are rendered with the same options."""
    (tmp_path / "deploy").symlink_to(REPOSITORY / "deploy")
    (tmp_path / "my-values.yaml").write_text("")
    text = page.read_text(encoding="utf-8").replace("\\\n", " ").replace("=…", "=registry.example")
    rendered = 0
    for line in text.splitlines():
        if line.startswith(("sed ", "(echo settings:")) and line.endswith("> my-values.yaml"):
            (tmp_path / "configs").unlink(missing_ok=True)
            (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
            subprocess.run(["bash", "-ec", line], cwd=tmp_path, check=True)
        if re.match(r"helm (install|upgrade) forage deploy", line):
            words = shlex.split(line, comments=True)[2:]
            of_upgrades = {"--rollback-on-failure", "--dry-run=server", "--timeout", "2h"}
            command = [str(find_helm(NEWEST_HELM)), "template", *(word for word in words if word not in of_upgrades)]
            ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stderr
            assert "kind: Deployment" in ended.stdout
            rendered += 1
    assert rendered, "the page installs nothing"
