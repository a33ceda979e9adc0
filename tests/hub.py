"""A hub on this machine: repositories with commits and branches in memory, in the protocol of `huggingface_hub`."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

#: Suffixes of files that are uploaded with the LFS protocol, if the client supports it.
LARGE = (".safetensors", ".bin", ".gguf", ".onnx", ".pte")


@dataclass(frozen=True)
class Commit:
    """All files of a repository after a commit."""

    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """A model repository.

    Args:
        large: files that were uploaded with the LFS protocol, by their SHA-256.
        commits: the first is empty, as on the hub.
        refs: from a branch to the number of its commit.
    """

    private: bool = False
    large: dict[str, bytes] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=lambda: [Commit("0" * 40, "initial commit", {})])
    refs: dict[str, int] = field(default_factory=lambda: {"main": 0})

    def at(self, revision: str) -> Commit | None:
        """The commit of a branch or the one with this number."""
        if revision in self.refs:
            return self.commits[self.refs[revision]]
        return next((commit for commit in self.commits if commit.oid == revision), None)

    def commit(self, branch: str, lines: list[dict[str, Any]]) -> Commit:
        """Adds a commit, from the lines of a request."""
        files = dict(self.commits[self.refs[branch]].files)
        for kind, value in ((line["key"], line["value"]) for line in lines[1:]):
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
            else:
                raise ValueError(f"The hub of the tests cannot do {kind}.")
        oid = hashlib.sha1(f"{id(self)} {len(self.commits)}".encode()).hexdigest()
        self.commits.append(Commit(oid, lines[0]["value"]["summary"], files))
        self.refs[branch] = len(self.commits) - 1
        return self.commits[-1]


@dataclass(frozen=True)
class Answer:
    """What a server sends."""

    status: int
    body: bytes
    headers: dict[str, str]


def _json(content: Any, status: int = 200, **headers: str) -> Answer:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **names})


def _missing(code: str) -> Answer:
    return _json({"error": code}, 404, X_Error_Code=code, X_Error_Message=code)


class Hub:
    """The repositories of the user "someone".

    Args:
        refuse: parts of paths that are answered with status 403.
        large: whether files are uploaded with the LFS protocol where the hub would. It requires
            `HF_HUB_DISABLE_XET=1` in the client.
    """

    def __init__(self, refuse: tuple[str, ...] = (), large: bool = False) -> None:
        self.refuse, self.large = refuse, large
        self.repositories: dict[str, Repository] = {}
        self.url = ""

    @property
    def commits(self) -> list[Commit]:
        """Commits of the only repository, after the empty one."""
        (repository,) = self.repositories.values()
        return repository.commits[1:]

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the only repository after all commits."""
        return self.commits[-1].files

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """The answer to a request."""
        if any(part in path for part in self.refuse):
            return _json({"error": "You have no right to write here."}, 403)
        words = [unquote(word) for word in path.partition("?")[0].strip("/").split("/")]
        if words == ["api", "whoami-v2"]:
            return _json({"type": "user", "name": "someone", "orgs": []})
        if words == ["api", "validate-yaml"]:
            return _json({"errors": [], "warnings": []})
        if words == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if words[0] == "storage":
            return self._store(method, words[1], "/".join(words[2:4]), body)
        in_api = words[:2] == ["api", "models"]
        owner, model, *rest = words[2:] if in_api else [*words, "", ""]
        name = f"{owner}/{model}"
        repository = self.repositories.get(name.removesuffix(".git"))
        if repository is None:
            return _missing("RepoNotFound")
        if name.endswith(".git"):
            return self._batch(name.removesuffix(".git"), repository, json.loads(body))
        if in_api:
            return self._api(name, repository, rest, body)
        return self._resolve(name, repository, rest[1], "/".join(word for word in rest[2:] if word))

    def _create(self, asked: dict[str, Any]) -> Answer:
        name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        url = f"{self.url}/{name}"
        if name in self.repositories:
            return _json({"error": "You already created this model repo", "url": url}, 409)
        self.repositories[name] = Repository(private=asked.get("private") or asked.get("visibility") == "private")
        return _json({"url": url, "id": "1", "name": name})

    def _api(self, name: str, repository: Repository, words: list[str], body: bytes) -> Answer:
        action, revision = (words[0], "/".join(words[1:])) if words else ("revision", "main")
        if action == "branch":
            repository.refs.setdefault(revision, repository.refs["main"])
            return _json({})
        commit = repository.at(revision)
        if commit is None:
            return _missing("RevisionNotFound")
        if action == "revision":
            siblings = [{"rfilename": path} for path in commit.files]
            return _json({"id": name, "sha": commit.oid, "siblings": siblings, "private": repository.private})
        if action == "tree":
            return _json([{"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                          for path, data in commit.files.items()])  # fmt: skip
        if action == "preupload":
            return _json({"files": [
                {"path": file["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if self.large and file["path"].endswith(LARGE) else "regular"}
                for file in json.loads(body)["files"]
            ]})  # fmt: skip
        if action == "commit":
            made = repository.commit(revision, [json.loads(line) for line in body.splitlines()])
            url = f"{self.url}/{name}/commit/{made.oid}"
            return _json({"success": True, "commitUrl": url, "commitOid": made.oid, "hookOutput": ""})
        return _missing("EntryNotFound")

    def _batch(self, name: str, repository: Repository, asked: dict[str, Any]) -> Answer:
        objects: list[dict[str, Any]] = []
        for one in asked["objects"]:
            upload = {"upload": {"href": f"{self.url}/storage/{one['oid']}/{name}"}}
            objects.append(one if one["oid"] in repository.large else {**one, "actions": upload})
        return _json({"transfer": "basic", "objects": objects})

    def _store(self, method: str, oid: str, name: str, body: bytes) -> Answer:
        repository = self.repositories[name]
        if method == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                return _json({"error": "other content than announced"}, 400)
            repository.large[oid] = body
            return _json({})
        return Answer(200, repository.large[oid], {"Content-Type": "application/octet-stream"})

    def _resolve(self, name: str, repository: Repository, revision: str, path: str) -> Answer:
        commit = repository.at(revision)
        if commit is None:
            return _missing("RevisionNotFound")
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            missing = _missing("EntryNotFound")
            return Answer(missing.status, missing.body, missing.headers | headers)
        data = commit.files[path]
        oid = hashlib.sha256(data).hexdigest()
        if oid not in repository.large:
            return Answer(200, data, headers | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        linked = {"X-Linked-ETag": f'"{oid}"', "X-Linked-Size": str(len(data))}
        # Clients follow a redirect only to another host, as the hub's storage is.
        storage = self.url.replace("127.0.0.1", "localhost")
        return Answer(302, b"", headers | linked | {"Location": f"{storage}/storage/{oid}/{name}"})


class Place:
    """The address of a server, which several hubs may use, one after the other."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """The answer of the current hub."""
        self.hub.url = self.url
        return self.hub.answer(method, path, body)


@contextmanager
def serving(place: Place) -> Iterator[Place]:
    """Answers on a free port of this machine while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = self.headers.get("Content-Length")
            body = self.rfile.read(int(length)) if length is not None else self.chunks()
            found = place.answer(self.command, self.path, body)
            self.send_response(found.status)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(found.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found.body)

        def chunks(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return b""
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        do_GET = do_HEAD = do_POST = do_PUT = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    place.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield place
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
