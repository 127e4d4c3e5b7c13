"""Generates docs/reference/api.md and docs/reference/openapi/ from the protos and from the services' HTTP routes.

.venvs/cli/bin/python scripts/api_doc.py                writes the page and the OpenAPI files
.venvs/<service>/bin/python scripts/api_doc.py NAME     prints that of retriever or rollout, or the console's section
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forage_runtime.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs/reference/api.md"
OPENAPI = REPOSITORY / "docs/reference/openapi"
SERVICES = {"retriever": "retriever.http_address", "rollout": "rollout.http_address"}
"""Service with an HTTP API → setting of its address."""
CONSOLE = "console.http_address"
_INTRODUCTION = """# API

This page lists the HTTP routes and the gRPC services of Forage. The contracts are the files of `proto/forage/v1`: each
message on a stream or a wire is one of them. `make reference` generates this page.

Every service answers `GET /healthz`, `GET /readyz`, `GET /waitz` and `GET /metrics` at its `health_address` (retriever
and console at their `http_address`), and every gRPC service offers health checks and reflection. `/waitz` lists
[every wait in progress](../explanation/reliability.md#waits). With `*.auth_token_file` set, calls carry the token as
`authorization: Bearer TOKEN`.
"""
_SCALARS = {
    1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32", 8: "bool", 9: "string",
    12: "bytes", 13: "uint32", 15: "sfixed32", 16: "sfixed64", 17: "sint32", 18: "sint64",
}  # fmt: skip
_MESSAGE, _ENUM, _REPEATED = 11, 14, 3
_PACKAGE = ".forage.v1."


def describe_http_api(service: str) -> str:
    """OpenAPI description of a service's HTTP routes, as JSON; the service must be installed in this environment."""
    module = importlib.import_module(f"forage_{service}.serve.http_api")
    # Routes are described without a backend: their functions are not called.
    arguments = [None, None] if service == "retriever" else [None, None, Settings()]
    return json.dumps(module.make_app(*arguments).openapi(), indent=1, ensure_ascii=False) + "\n"


def render_console_section() -> str:
    """Render the routes of the console, which must be installed in this environment."""
    from upath import UPath

    from forage_console.app import make_app
    from forage_console.context import Console

    description = make_app(Console(UPath("runs"), Settings())).openapi()
    lines = ["## HTTP: console\n", f"At `{CONSOLE}`, for its own pages: it may change with every version.\n"]
    lines.append(
        "A console that runs describes it in full at `/api/openapi.json`. What moves are server-sent events.\n"
    )
    lines.append("| route | what |\n|---|---|")
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            lines.append(_row(f"`{method.upper()} {path}`", operation.get("description", "").partition("\n")[0]))
    return "\n".join(lines) + "\n"


def render_http_section(service: str, description: Mapping[str, Any]) -> str:
    """Render a service's routes and the fields of their bodies."""
    lines = [f"## HTTP: {service}\n", f"At `{SERVICES[service]}`. [OpenAPI description](openapi/{service}.json).\n"]
    lines += [f"{description['info']['description'].strip()}\n", "| route | body | reply | other statuses |"]
    lines.append("|---|---|---|---|")
    schemas: dict[str, Any] = {}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            replies = dict(operation["responses"])
            body = _schema_names(operation.get("requestBody", {}), description, schemas)
            reply = _schema_names(replies.pop("200", {}), description, schemas)
            for other in replies.values():
                _schema_names(other, description, schemas)
            lines.append(_row(f"`{method.upper()} {path}`", body, reply, ", ".join(replies)))
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            if text := operation.get("description"):
                lines.append(f"\n`{method.upper()} {path}`: {_line(text)}")
            for name, header in operation["responses"].get("200", {}).get("headers", {}).items():
                lines.append(f"\nHeader `{name}` of its reply: {_line(header['description'])}")
    for name, schema in schemas.items():
        lines.append(f"\n### `{name}`\n")
        if text := schema.get("description"):
            lines.append(f"{_line(text)}\n")
        lines.append("| field | type | description |\n|---|---|---|")
        required = schema.get("required", ())
        for field, value in schema.get("properties", {}).items():
            notes = [value.get("description", "")]
            if field in required:
                notes.append("required")
            elif value.get("default") not in (None, ""):
                notes.append(f"default `{json.dumps(value['default'])}`")
            lines.append(_row(f"`{field}`", _schema_type(value), "; ".join(filter(None, notes))))
    return "\n".join(lines) + "\n"


def _schema_names(part: Mapping[str, Any], description: Mapping[str, Any], schemas: dict[str, Any]) -> str:
    """Names of the schemas of a body or reply, with links; adds them and those they contain to `schemas`."""
    names: dict[str, None] = {}

    def visit(schema: Mapping[str, Any], top: bool) -> None:
        if reference := schema.get("$ref", "").rpartition("/")[2]:
            schema = description["components"]["schemas"][reference] | {"title": reference}
        for choice in schema.get("anyOf", ()):
            visit(choice, top)
        if "items" in schema:
            visit(schema["items"], False)
        if "properties" in schema:
            if top:
                names[schema["title"]] = None
            if schema["title"] not in schemas:
                schemas[schema["title"]] = schema
                for value in schema["properties"].values():
                    visit(value, False)

    for content in part.get("content", {}).values():
        visit(content.get("schema", {}), True)
    return " or ".join(f"[{name}](#{name.lower()})" for name in names)


def _schema_type(schema: Mapping[str, Any]) -> str:
    if reference := schema.get("$ref", "").rpartition("/")[2]:
        return f"[{reference}](#{reference.lower()})"
    if choices := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(map(_schema_type, choices)))
    if schema.get("type") == "array":
        return f"list of {_schema_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def render_grpc_section() -> str:
    """Render services, messages and enums of proto/forage/v1 with their comments."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    protos = sorted((REPOSITORY / "proto/forage/v1").glob("*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(REPOSITORY / "proto"), "--include_source_info"]
        subprocess.run([*protoc, f"--descriptor_set_out={out.name}", *map(str, protos)], check=True)
        files = FileDescriptorSet.FromString(Path(out.name).read_bytes()).file
    return "\n".join(line for file in sorted(files, key=lambda file: not file.service) for line in _proto(file))


def _proto(file: Any) -> Iterator[str]:
    comments = {tuple(place.path): place for place in file.source_code_info.location}

    def comment(*path: int) -> str:
        place = comments.get(path)
        return "" if place is None else " ".join(f"{place.leading_comments} {place.trailing_comments}".split())

    yield f"## gRPC: {Path(file.name).name}\n"
    place = comments.get((12,))  # the comment above `syntax` is that of the file
    if place is not None and place.leading_comments.strip():
        yield f"{_line(place.leading_comments)}\n"
    for index, service in enumerate(file.service):
        yield f"### Service `{service.name}`\n"
        if text := comment(6, index):
            yield f"{_line(text)}\n"
        yield "| rpc | request | reply | description |\n|---|---|---|---|"
        for number, rpc in enumerate(service.method):
            request = ("stream of " if rpc.client_streaming else "") + _link(rpc.input_type)
            reply = ("stream of " if rpc.server_streaming else "") + _link(rpc.output_type)
            yield _row(f"`{rpc.name}`", request, reply, comment(6, index, 2, number))
        yield ""
    for index, message in enumerate(file.message_type):
        yield f"### Message `{message.name}`\n"
        if text := comment(4, index):
            yield f"{_line(text)}\n"
        if message.field:
            yield "| field | type | description |\n|---|---|---|"
        for number, field in enumerate(message.field):
            text = comment(4, index, 2, number)
            if field.HasField("oneof_index") and not field.proto3_optional:
                oneof = message.oneof_decl[field.oneof_index].name
                text = f"{text} (one of `{oneof}`)".strip()
            entry = next((kind for kind in message.nested_type if field.type_name.endswith(f".{kind.name}")), None)
            kind = _field_type(field) if entry is None else f"map of {' to '.join(map(_field_type, entry.field))}"
            yield _row(f"`{field.name}`", kind, text)
        yield ""
    for index, enum in enumerate(file.enum_type):
        yield f"### Enum `{enum.name}`\n"
        if text := comment(5, index):
            yield f"{_line(text)}\n"
        yield "| value | description |\n|---|---|"
        for number, value in enumerate(enum.value):
            yield _row(f"`{value.name}`", comment(5, index, 2, number))
        yield ""


def _field_type(field: Any) -> str:
    name = _link(field.type_name) if field.type in (_MESSAGE, _ENUM) else _SCALARS[field.type]
    if field.label == _REPEATED:
        return f"list of {name}"
    return f"{name}, optional" if field.proto3_optional else name


def _link(type_name: str) -> str:
    """Link to the section of a message or enum of ours."""
    if not type_name.startswith(_PACKAGE):
        return f"`{type_name.lstrip('.')}`"
    name = type_name.removeprefix(_PACKAGE)
    kind = "enum" if name in _enums() else "message"
    return f"[{name}](#{kind}-{name.lower()})"


def _enums() -> set[str]:
    from forage_proto.v1 import probe_pb2, retriever_pb2, reward_pb2, rollout_pb2, trajectory_pb2

    modules = (probe_pb2, retriever_pb2, reward_pb2, rollout_pb2, trajectory_pb2)
    return {name for module in modules for name in module.DESCRIPTOR.enum_types_by_name}


def _row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "|" + "|".join(f" {_line(cell)} ".replace("|", "\\|") if cell else " " for cell in cells) + "|"


def _line(text: str) -> str:
    """Text on one line, without what Markdown would read as a tag."""
    return " ".join(text.split()).replace("<", "&lt;")


def _write() -> None:
    parts = [_INTRODUCTION]
    OPENAPI.mkdir(exist_ok=True)
    for service in SERVICES:
        command = [str(REPOSITORY / f".venvs/{service}/bin/python"), __file__, service]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout
        (OPENAPI / f"{service}.json").write_text(text, encoding="utf-8")
        parts.append(render_http_section(service, json.loads(text)))
    command = [str(REPOSITORY / ".venvs/console/bin/python"), __file__, "console"]
    parts.append(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout)
    DOCUMENT.write_text("\n".join([*parts, render_grpc_section()]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["console"]:
        sys.stdout.write(render_console_section())
    elif sys.argv[1:]:
        sys.stdout.write(describe_http_api(sys.argv[1]))
    else:
        _write()
