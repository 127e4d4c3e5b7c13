"""A small server of a knowledge graph.

    python examples/knowledge_graph/graph.py data/knowledge_graph/triples.jsonl 127.0.0.1:18640

POST /query {"function": "get_tail_entities", "entity": "France", "relation": "capital"} → {"values": ["Paris"]}.
422 {"error": "…"} where the graph knows no such entity or relation. GET /healthz.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAX_BODY = 10_000
Index = dict[str, dict[str, list[str]]]


class UnknownError(LookupError):
    """The graph does not know this; the message says what it knows instead."""


class Graph:
    """Triples, found by their head and by their tail."""

    def __init__(self, triples: Iterable[tuple[str, str, str]]) -> None:
        tails: Index = {}
        heads: Index = {}
        for head, relation, tail in triples:
            tails.setdefault(head, {}).setdefault(relation, []).append(tail)
            heads.setdefault(tail, {}).setdefault(relation, []).append(head)
        self._sides = {"get_tail": tails, "get_head": heads}
        self._names = {name.lower(): name for name in (*heads, *tails)}

    @classmethod
    def from_file(cls, file: Path) -> Graph:
        """Read JSONL of {"head", "relation", "tail"}."""
        rows = (json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line)
        return cls((row["head"], row["relation"], row["tail"]) for row in rows)

    def query(self, function: str, entity: str, relation: str = "") -> list[str]:
        """Return the names that answer, in the order of the triples. Letter case of the entity does not matter.

        Raises:
            UnknownError: no such function, entity, or relation of this entity.
        """
        side, _, wanted = function.rpartition("_")
        if side not in self._sides or wanted not in ("relations", "entities"):
            raise UnknownError(f"There is no function {function}.")
        name = self._names.get(entity.lower())
        if name is None:
            near = get_close_matches(entity.lower(), self._names, n=1)
            hint = f" Did you mean {self._names[near[0]]}?" if near else ""
            raise UnknownError(f"The graph has no entity {entity}.{hint}")
        relations = self._sides[side].get(name, {})
        if wanted == "relations":
            return list(relations)
        if relation not in relations:
            having = ", ".join(relations) or "none"
            raise UnknownError(f"{name} has no relation {relation} in this direction. It has: {having}.")
        return relations[relation]


class GraphServer(ThreadingHTTPServer):
    """Serves one graph."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], graph: Graph) -> None:
        super().__init__(address, _Handler)
        self.graph = graph


class _Handler(BaseHTTPRequestHandler):
    server: GraphServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60

    def do_GET(self) -> None:  # the name is http.server's
        known = self.path == "/healthz"
        self._reply(HTTPStatus.OK if known else HTTPStatus.NOT_FOUND, {"status": "ok" if known else "not found"})

    def do_POST(self) -> None:  # the name is http.server's
        length = self.headers.get("Content-Length", "")
        if self.path != "/query" or not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True  # the body stays unread
            self._reply(HTTPStatus.BAD_REQUEST, {"error": f"POST /query with at most {MAX_BODY} bytes of JSON"})
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
            asked = [body["function"], body["entity"], body.get("relation", "")]
            if not all(isinstance(text, str) for text in asked):
                raise TypeError("function, entity and relation are texts")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._reply(HTTPStatus.BAD_REQUEST, {"error": f"not a query ({error!r})"})
            return
        try:
            self._reply(HTTPStatus.OK, {"values": self.server.graph.query(*asked)})
        except UnknownError as error:
            self._reply(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})

    def _reply(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # one line a request would be too many
        pass


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if len(sys.argv) != 3 or not sys.argv[2].rpartition(":")[2].isdecimal():
        sys.exit("usage: graph.py TRIPLES.jsonl HOST:PORT")
    file, (host, _, port) = Path(sys.argv[1]), sys.argv[2].rpartition(":")
    try:
        graph = Graph.from_file(file)
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"{file} is not a file of triples ({error!r}): make one with 'forage data knowledge-graph'")
    try:
        server = GraphServer((host, int(port)), graph)
    except OSError as error:
        sys.exit(f"{sys.argv[2]} cannot be listened on ({error.strerror}): give another HOST:PORT")
    with server:
        logging.info("serving %s on %s:%s", file, host, server.server_address[1])
        server.serve_forever()


if __name__ == "__main__":
    main()
