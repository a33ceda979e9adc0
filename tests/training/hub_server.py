"""As much of the hub as an upload needs, on this machine: repositories are made, commits are kept in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What was uploaded.

    Args:
        refuse: paths (their beginnings after `/api/`) that are answered with status 403.
    """

    def __init__(self, refuse: tuple[str, ...] = ()) -> None:
        self.refuse = refuse
        self.repositories: list[str] = []
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.url = ""

    @property
    def files(self) -> dict[str, bytes]:
        """Of the repository, after all commits."""
        return {name: content for _, files in self.commits for name, content in files.items()}

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON."""
        words = path.partition("?")[0].removeprefix("/api/").split("/")
        if any(part in path for part in self.refuse):
            return 403, {"error": "You have no right to write here."}
        if words == ["repos", "create"]:
            name = f"someone/{json.loads(body)['name']}"
            self.repositories.append(name)
            return 200, {"url": f"{self.url}/{name}", "id": "1", "name": name}
        if words[0] == "validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "preupload" in words:
            asked = json.loads(body)["files"]
            return 200, {
                "files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            }
        if "commit" in words:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.commits.append((lines[0]["value"]["summary"], files))
            number = f"{len(self.commits):040}"
            url = f"{self.url}/{self.repositories[-1]}/commit/{number}"
            return 200, {"success": True, "commitUrl": url, "commitOid": number, "hookOutput": ""}
        if words[:1] == ["models"]:
            return 200, {"id": "/".join(words[1:3]), "sha": "0" * 40, "siblings": [], "private": False}
        return 404, {"error": f"nothing at {path}"}


class Place:
    """The address of a server, where one hub after the other may answer."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.url = ""

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """That of the hub which is there now."""
        self.hub.url = self.url
        return self.hub.answer(path, body)


@contextmanager
def serving(hub: Place) -> Iterator[Place]:
    """Answers on a free port of this machine while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = self.headers.get("Content-Length")
            body = self.rfile.read(int(length)) if length is not None else self.chunks()
            status, content = hub.answer(self.path, body)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def chunks(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return b""
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
