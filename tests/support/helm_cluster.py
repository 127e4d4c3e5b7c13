"""A cluster for Helm's `lookup`: an API server that has the objects that a test adds, and nothing else."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helm_chart import NAMESPACE, NEWEST_HELM, Object, render, run_template


class Cluster:
    """Objects of an earlier install, behind an API server on loopback."""

    def __init__(self, kubeconfig: Path) -> None:
        kinds = {
            (item["apiVersion"], item["kind"])
            for name in ("every option on", "trainer on Ray")
            for item in render(name)
        }
        self.pages = _build_discovery_pages(kinds)
        self._versions = {kind: version for version, kind in kinds}
        self._kubeconfig = kubeconfig

    def add(self, kind: str, name: str, component: str, created: str = "2026-01-01T00:00:00Z", **fields: Any) -> None:
        """Add an object of the release `forage`."""
        version = self._versions[kind]
        folder = f"/{'apis' if '/' in version else 'api'}/{version}/namespaces/{NAMESPACE}/{kind.lower()}s"
        labels = {
            "app.kubernetes.io/managed-by": "Helm",
            "app.kubernetes.io/instance": "forage",
            "app.kubernetes.io/component": component,
        }
        owner = {"meta.helm.sh/release-name": "forage", "meta.helm.sh/release-namespace": NAMESPACE}
        metadata = {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": owner}
        metadata["creationTimestamp"] = created
        metadata |= fields.pop("metadata", {})
        item = {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}
        self.pages[f"{folder}/{name}"] = item
        listed = self.pages.setdefault(folder, {"apiVersion": version, "kind": f"{kind}List", "items": []})
        listed["items"].append(item)

    def render(
        self, values: Mapping[str, Any] | Path, version: str = NEWEST_HELM, *options: str
    ) -> subprocess.CompletedProcess[str]:
        """Render an upgrade to these values, which may fail."""
        asked = ["--dry-run=server", "--is-upgrade", "--kubeconfig", str(self._kubeconfig)]
        return run_template(values, version, *asked, "--disable-openapi-validation", *options)


def _build_discovery_pages(kinds: set[tuple[str, str]]) -> dict[str, Object]:
    """Build the pages of a server that knows the kinds of the chart."""
    groups = []
    pages: dict[str, Object] = {"/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}}
    for version in sorted({version for version, _ in kinds}):
        listed = [kind for where, kind in kinds if where == version]
        resources = [
            {"name": f"{kind.lower()}s", "namespaced": True, "kind": kind, "verbs": ["get", "list"]} for kind in listed
        ]
        page = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        pages[f"/apis/{version}" if "/" in version else f"/api/{version}"] = page
        if "/" in version:
            entry = {"groupVersion": version, "version": version.partition("/")[2]}
            groups.append({"name": version.partition("/")[0], "versions": [entry], "preferredVersion": entry})
    pages["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
    pages["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return pages


class _ApiServer(BaseHTTPRequestHandler):
    """The part of Kubernetes' API that `lookup` calls."""

    pages: dict[str, Object]

    def do_GET(self) -> None:  # the name is http.server's
        page = self.pages.get(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(page or missing).encode()
        self.send_response((page or missing).get("code", 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster without objects."""
    config = tmp_path / "kubeconfig"
    made = Cluster(config)
    handler = type("Handler", (_ApiServer,), {"pages": made.pages})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        contexts = [{"name": "x", "context": {"cluster": "x", "user": "x"}}]
        clusters, users = [{"name": "x", "cluster": {"server": address}}], [{"name": "x", "user": {}}]
        tree = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
        config.write_text(json.dumps(tree | {"contexts": contexts, "clusters": clusters, "users": users}))
        yield made
        server.shutdown()
