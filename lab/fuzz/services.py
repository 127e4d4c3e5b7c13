"""The services that are fuzzed over their wires: how each is started, and what its good requests look like."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from ports import reserve_ports

from forage_proto.v1 import retriever_pb2, reward_pb2, rollout_pb2
from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    ChatMessage,
    GroundTruth,
    Policy,
    Prompt,
    Role,
    Sampling,
    Score,
    Span,
    Status,
    Turn,
)
from forage_runtime.settings import load_settings
from fuzz.calls import GrpcSurface, list_all_methods
from fuzz.damage import damage
from fuzz.processes import REPOSITORY, Process
from fuzz.requests import HttpSurface
from fuzz.targets import ServiceTarget

MODEL = REPOSITORY / "models/tiny-policy"
_ROUTES = {
    "world_facts": {"name": "search_r1_format"},
    "em": {"name": "em"},
    "subem": {"name": "subem"},
    "f1": {"name": "f1"},
    "countdown": {"name": "countdown"},
    "math": {"name": "math"},
    "structured": {"name": "structured"},
}
_PASSAGES = (("Norway", "nb"), ("Oslo", "nb"), ("Kandy", "si"), ("São Paulo", "pt"))


def make_reward(folder: Path) -> ServiceTarget:
    """The reward service with a route to every built-in reward that calls nobody."""
    grpc_port, health_port = reserve_ports(), reserve_ports()
    settings = [f"reward.grpc_address=127.0.0.1:{grpc_port}", f"reward.health_address=127.0.0.1:{health_port}"]
    routes = [f"reward.routes.{source}.name={route['name']}" for source, route in _ROUTES.items()]
    process = Process("reward", ["-m", "forage_reward", *settings, *routes, "reward.workers=1"], folder, "reward")
    methods = list_all_methods(describe_reward())
    return ServiceTarget([process], (health_port, "/healthz"), grpc_port=grpc_port, grpc_methods=methods)


def describe_reward() -> GrpcSurface:
    items = [_build_item(source) for source in _ROUTES]
    examples: dict[str, list[Message]] = {
        "Score": [reward_pb2.ScoreRequest(items=[item]) for item in items] + [reward_pb2.ScoreRequest(items=items)],
        "ScoreStream": [reward_pb2.ScoreStreamRequest(id=number, item=item) for number, item in enumerate(items)],
        "Describe": [reward_pb2.DescribeRequest(name=name) for name in ("", "em", "f1")],
        "Explain": [reward_pb2.ExplainRequest(item=item, score=Score(reward="em", total=1.0)) for item in items],
    }
    return GrpcSurface("reward", reward_pb2.DESCRIPTOR.services_by_name["Reward"], examples)


def make_retriever(folder: Path) -> ServiceTarget:
    """The retriever over a small corpus, with BM25."""
    rows = [
        {"id": f"p{n}", "contents": f'"{title}"\n{title} is a place.', "lang": language, "url": f"https://x/{n}"}
        for n, (title, language) in enumerate(_PASSAGES)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    http_port, grpc_port = reserve_ports(), reserve_ports()
    settings = [
        f"data.corpus={folder / 'corpus.jsonl'}",
        f"retriever.cache_dir={folder / 'cache'}",
        "retriever.mode=bm25",
        "retriever.filter_fields=[lang, url]",
        f"retriever.http_address=127.0.0.1:{http_port}",
        f"retriever.grpc_address=127.0.0.1:{grpc_port}",
    ]
    process = Process("retriever", ["-m", "forage_retriever", *settings], folder, "retriever")
    methods = list_all_methods(describe_retriever_calls())
    return ServiceTarget([process], (http_port, "/healthz"), http_port, grpc_port, methods)


def describe_retriever_calls() -> GrpcSurface:
    asked = retriever_pb2.RetrieveRequest(queries=["Oslo", "place"], topk=2, mode="bm25", rows=True)
    filtered = retriever_pb2.RetrieveRequest(
        queries=["Norway"], topk=1, filters=[retriever_pb2.Filter(field="lang", values=["nb", "si"])]
    )
    examples: dict[str, list[Message]] = {
        "Retrieve": [asked, filtered],
        "RetrieveStream": [retriever_pb2.RetrieveStreamRequest(id=1, request=one) for one in (asked, filtered)],
    }
    return GrpcSurface("retriever-grpc", retriever_pb2.DESCRIPTOR.services_by_name["Retriever"], examples)


def describe_retriever_http() -> HttpSurface:
    options = {"return_scores": True, "filters": {"lang": ["nb"], "url": "https://x/1"}, "mode": "bm25"}
    bodies: dict[str, list[Any]] = {
        "/retrieve": [
            {"queries": ["Oslo", "place"], "topk": 2, **options},
            {"query": "Oslo", "top_k": 3, **options},
            {"query": "Oslo", "k": 1},
        ],
        "/queries": [{"queries": ["Oslo"], "k": 2}],
        "/access": [{"urls": ["https://x/1", "https://x/9"]}],
    }
    paths = ["/healthz", "/readyz", "/waitz", "/health", "/metrics", "/docs", "/openapi.json", "/retrieve", "/nowhere"]
    return HttpSurface("retriever-http", _read_page("retriever"), bodies, paths, {"x": ["1"], "topk": ["2"]})


def make_rollout(folder: Path) -> ServiceTarget:
    """The front of the rollout service, see `programs.rollout_front`."""
    settings = load_settings(REPOSITORY / "configs/demo.yaml", [f"model.path={MODEL}"], {})
    (folder / "rollout.yaml").write_text(settings.to_yaml())
    ports = [reserve_ports() for _ in range(3)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    arguments = ["-m", "fuzz.programs.rollout_front", str(folder / "rollout.yaml"), *addresses]
    process = Process("rollout", arguments, folder, "rollout")
    methods = list_all_methods(describe_rollout_calls())
    return ServiceTarget([process], (ports[2], "/healthz"), ports[1], ports[0], methods)


def describe_rollout_calls() -> GrpcSurface:
    prompts = [build_prompt(), build_prompt(token_ids=[1, 2, 3, 4]), build_prompt(environment="search", samples=3)]
    examples: dict[str, list[Message]] = {
        "Run": [rollout_pb2.RunRequest(prompt=prompt) for prompt in prompts],
        "RunStream": [rollout_pb2.RunStreamRequest(prompt=prompt) for prompt in prompts],
        "Pause": [rollout_pb2.PauseRequest(drain=True)],
        "UpdateWeights": [rollout_pb2.UpdateWeightsRequest(policy=Policy(version=9, epoch=1, uri="/nowhere"))],
    }
    service = rollout_pb2.DESCRIPTOR.services_by_name["Rollout"]
    return GrpcSurface("rollout-grpc", service, examples, has_reflection=False)


def describe_rollout_http() -> HttpSurface:
    chat = [{"role": "user", "content": "Who is it?"}]
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "timeout_s": 5, "samples": 2}
    bodies: dict[str, list[Any]] = {
        "/v1/ask": [
            {"question": "Who?", "stream": False, **sampling},
            {"messages": chat, "stream": False, "environment": "search", "data_source": "world_facts"},
            {"question": "Who?", "stream": True},
        ],
        "/v1/chat/completions": [{"model": "policy", "messages": chat, "max_tokens": 5, "stream": False}],
        "/v1/completions": [{"model": "policy", "prompt": "Who?", "max_tokens": 5}],
    }
    paths = ["/v1/models", "/v1/ask", "/openapi.json", "/docs", "/v1/../v1/models", "/nowhere"]
    return HttpSurface("rollout-http", _read_page("rollout"), bodies, paths, {"x": ["1"]})


def make_console(folder: Path) -> ServiceTarget:
    """The console over runs of which most have damaged files."""
    from console_runs import NOWHERE, write_demo

    runs = folder / "runs"
    chance = random.Random(0)
    for number in range(6):
        run = write_demo(runs / f"run-{number}")
        files = sorted(file for file in run.rglob("*") if file.is_file() and not file.is_symlink())
        for file in chance.sample(files, len(files) // 2 if number else 0):
            file.write_bytes(damage(file.read_bytes(), chance))
    port = reserve_ports()
    settings = [f"run.dir={runs}", f"console.http_address=127.0.0.1:{port}", *NOWHERE]
    process = Process("console", ["-m", "forage_console", *settings], folder, "console")
    return ServiceTarget([process], (port, "/healthz"), http_port=port)


def describe_console() -> HttpSurface:
    from upath import UPath

    from forage_console.app import make_app
    from forage_console.context import Console

    page = make_app(Console(UPath("/nowhere"), load_settings(None, [], {}))).openapi()
    known = {
        "run": ["run-0", "run-1", "run-2", "run-3", "run-4", "run-5"],
        "step": ["1", "2", "5"],
        "place": ["step-1", "step-2", "validation-0"],
        "uid": ["world_facts%2Ftrain%2F1%2F0"],
        "row": ["0", "1"],
    }
    paths, queries = ["/", "/login", "/healthz", "/readyz", "/metrics", "/assets/x.js", "/runs/run-0"], {"q": ["a"]}
    for path, methods in page["paths"].items():
        paths += [_fill(path, known, number) for number in range(6)]
        for method in methods.values():
            for one in method.get("parameters", ()):
                if one["in"] == "query":
                    queries[one["name"]] = _list_values(one["schema"])
    bodies: dict[str, list[Any]] = {}
    for path, methods in page["paths"].items():
        if any("requestBody" in method for method in methods.values()):
            bodies[_fill(path, known, 0)] = [
                {"question": "Who?", "temperature": 0.0, "environment": ""},
                {"kind": "score"},
                {"kind": "sample"},
                {"notes": "mine", "tags": ["good"], "text": "mine"},
            ]
    return HttpSurface("console", page, bodies, sorted(set(paths)), queries, page_share=0.15)


def build_prompt(**fields: Any) -> Prompt:
    """A prompt that can be run."""
    known: dict[str, Any] = {
        "run_id": "fuzz",
        "group_uid": "world/train/1/0",
        "data_source": "world_facts",
        "messages": [ChatMessage(role="user", content="Who?")],
        "ground_truth": GroundTruth(targets=["me"]),
        "samples": 1,
        "sampling": Sampling(temperature=1.0, seed=1),
        "batch": 1,
    }
    return Prompt(**known | fields)


def _build_item(source: str) -> reward_pb2.ScoreItem:
    text = "<think>well</think><search> Oslo </search>"
    answer = "<answer> \\boxed{(1+2)*3} </answer><|im_end|>"
    return reward_pb2.ScoreItem(
        trajectory_id="t1",
        data_source=source,
        spans=[
            Span(role=Role.ROLE_PROMPT, end=4, text="What?"),
            Span(role=Role.ROLE_MODEL, begin=4, end=9, text=text),
            Span(role=Role.ROLE_ENV, begin=9, end=12, text="<information>Oslo is a place.</information>"),
            Span(role=Role.ROLE_MODEL, begin=12, end=20, text=answer),
        ],
        ground_truth=GroundTruth(targets=["9", "Oslo"], countdown_target=9, countdown_numbers=[1, 2, 3]),
        end_of_turn="<|im_end|>",
        turns=[
            Turn(
                index=1,
                action=ActionKind.ACTION_KIND_SEARCH,
                content="Oslo",
                executed=True,
                retrieval_status=Status.STATUS_OK,
            ),
            Turn(index=2, action=ActionKind.ACTION_KIND_ANSWER, content="(1+2)*3"),
        ],
    )


def _read_page(service: str) -> dict[str, Any]:
    page: dict[str, Any] = json.loads((REPOSITORY / f"docs/reference/openapi/{service}.json").read_text())
    return page


def _fill(path: str, known: dict[str, list[str]], number: int) -> str:
    for name, values in known.items():
        path = path.replace("{" + name + "}", values[number % len(values)])
    return path.replace("{", "").replace("}", "")


def _list_values(schema: dict[str, Any]) -> list[str]:
    """A few valid values of a query parameter."""
    for option in (schema, *schema.get("anyOf", ())):
        if "enum" in option:
            return [str(value) for value in option["enum"]]
        if option.get("type") in ("integer", "number"):
            return ["0", "1", "5", "100"]
        if option.get("type") == "boolean":
            return ["true", "false"]
    return ["a", "run-0", "reward", "1", "step,-reward"]
