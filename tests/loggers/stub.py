"""A small W&B server on this machine: it speaks the calls that logging and syncing need."""

import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

ENTITY = "somebody"
HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"
KEY = "0123456789abcdef" * 2 + "01234567"  # forty characters are what wandb takes for a key


class Kept:
    """What the server has been sent of one run."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}  # Any: what JSON can hold
        self.config: dict[str, Any] = {}
        self.lines: dict[str, list[str]] = {}
        self.files: dict[str, bytes] = {}
        self.exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows that were logged, without wandb's own numbers."""
        rows = [json.loads(line) for line in self.lines.get(HISTORY, [])]
        return [{key: row[key] for key in row if not key.startswith("_")} for row in rows]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.lines[SUMMARY][-1])


class Server(ThreadingHTTPServer):
    """Keeps runs by their id; `unknown` are the calls that it could not answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, Kept] = {}
        self.unknown: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep quiet: a client that ends takes its connection with it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def run(self, name: str) -> Kept:
        return self.runs.setdefault(name, Kept())

    def shown(self) -> dict[str, Kept]:
        """The runs by the name that a reader sees."""
        return {run.facts["displayName"]: run for run in self.runs.values()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride] - it has no other

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        _, _, run, name = unquote(self.path).split("/", 3)
        body = self._body()
        with self.server.lock:
            if run == "artifact":
                self.server.stored[name] = body
            else:
                self.server.run(run).files[name] = body
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        with self.server.lock:
            if self.path.endswith("/file_stream"):
                run = unquote(self.path).split("/")[-2]
                self._answer(self._streamed(self.server.run(run), json.loads(body)))
            elif self.path == "/graphql":
                call = json.loads(body)
                self._answer(self._queried(call["query"], call.get("variables") or {}))
            else:  # wandb's own telemetry
                self._answer({})

    def _streamed(self, run: Kept, body: dict[str, Any]) -> dict[str, Any]:
        for name, part in (body.get("files") or {}).items():
            lines = run.lines.setdefault(name, [])
            offset = part["offset"]
            lines[offset : offset + len(part["content"])] = part["content"]
        if body.get("complete"):
            run.exit_code = body["exitcode"]
        return {}

    def _queried(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = found.group(1) if found else query.split("{")[1].split()[0]
        if name not in ANSWERS:
            self.server.unknown.append(f"{name}: {query} {variables}")
            return {"data": None, "errors": [{"message": f"{name} is unknown"}]}
        return {"data": ANSWERS[name](self.server, variables)}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        else:
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


Answer = dict[str, Any]


def _viewer(server: Server, asked: Answer) -> Answer:
    teams = {"edges": [{"node": {"name": ENTITY}}]}
    return {
        "viewer": {"id": "1", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": teams}
    }


def _upsert(server: Server, asked: Answer) -> Answer:
    run = server.run(asked["name"])
    inserted = not run.facts
    run.facts |= {key: value for key, value in asked.items() if value is not None}
    told = json.loads(asked.get("config") or "{}")
    run.config |= {key: item["value"] for key, item in told.items() if key != "_wandb"}
    bucket = {
        "id": asked["name"],
        "name": asked["name"],
        "displayName": run.facts.get("displayName"),
        "config": "{}",
        "project": {
            "id": "1",
            "name": run.facts["project"],
            "entity": {"id": "1", "name": ENTITY},
        },
        "historyLineCount": len(run.lines.get(HISTORY, [])),
    }
    return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}


def _files(server: Server, asked: Answer) -> Answer:
    urls = [
        {"name": name, "uploadUrl": f"{server.url}/store/{asked['run']}/{quote(name, safe='')}"}
        for name in asked["files"]
    ]
    return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": urls}}


def _resumed(server: Server, asked: Answer) -> Answer:
    """What a run that goes on is told that the server has of it."""
    run = server.runs.get(asked["name"])
    if run is None:
        return {"model": {"bucket": None}}
    history = run.lines[HISTORY]
    bucket = {
        "id": asked["name"],
        "name": asked["name"],
        "summaryMetrics": run.lines[SUMMARY][-1],
        "displayName": run.facts["displayName"],
        "logLineCount": 0,
        "historyLineCount": len(history),
        "eventsLineCount": 0,
        "historyTail": json.dumps(history[-1:]),
        "eventsTail": "[]",
        "config": "{}",
        "tags": run.facts.get("tags", []),
        "wandbConfig": json.dumps({"t": 1}),
    }
    return {"model": {"id": "1", "name": asked["project"], "bucket": bucket}}


def _created(server: Server, asked: Answer) -> Answer:
    made = {"id": "artifact", "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
    return {"createArtifact": {"artifact": made}}


def _manifest(server: Server, asked: Answer) -> Answer:
    url = f"{server.url}/store/artifact/{asked['name']}"
    file = {"id": "file", "uploadUrl": url, "uploadHeaders": []}
    return {"createArtifactManifest": {"artifactManifest": {"id": "manifest", "file": file}}}


def _artifact_files(server: Server, asked: Answer) -> Answer:
    files = asked.get("artifactFiles") or asked["input"]["artifactFiles"]
    edges = [
        {
            "node": {
                "id": file["name"],
                "name": file["name"],
                "displayName": file["name"],
                "uploadUrl": f"{server.url}/store/artifact/{quote(file['name'], safe='')}",
                "uploadHeaders": [],
                "storagePath": file["name"],
                "uploadMultipartUrls": None,
                "artifact": {"id": "artifact"},
            }
        }
        for file in files
    ]
    return {"createArtifactFiles": {"files": {"edges": edges}}}


ANSWERS: dict[str, Callable[[Server, Answer], Answer]] = {
    "Viewer": _viewer,
    "UpsertBucket": _upsert,
    "CreateRunFiles": _files,
    "RunResumeStatus": _resumed,
    "ServerFeaturesQuery": lambda server, asked: {"serverInfo": {"features": []}},
    "ArtifactType": lambda server, asked: {"project": {"artifact": None}},
    "CreateArtifact": _created,
    "CreateArtifactManifest": _manifest,
    "CreateArtifactFiles": _artifact_files,
    "UpdateArtifactManifest": lambda server, asked: {
        "updateArtifactManifest": _manifest(server, {"name": "manifest"})["createArtifactManifest"]
    },
    "CommitArtifact": lambda server, asked: {
        "commitArtifact": {"artifact": {"id": "artifact", "digest": ""}}
    },
}


@contextmanager
def server() -> Iterator[Server]:
    """A server in a thread of its own, for a block."""
    made = Server()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
