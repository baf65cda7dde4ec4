"""A Hub of one's own: the protocol that the real client speaks, over real sockets, in memory, with faults on request.
Large files are served from another host name, as from the Hub's CDN, which must not be sent the token."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, constants

WRITER = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
READER = "hf_OnlyReads0123456789AbCdEfGhIjKlMnOp"
OTHER = "hf_SomeoneElse6789AbCdEfGhIjKlMnOpQrS"
USERS = {WRITER: ("me", True), READER: ("me", False), OTHER: ("them", True)}
"""Tokens: whose they are, and whether they may write."""

LARGE = (".safetensors", ".bin", ".model")
LICENCES = ("apache-2.0", "mit", "other", "cc-by-4.0", "psfl")


def as_the_hub(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a server the one that the client asks, as HF_ENDPOINT does for a process that begins."""
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@dataclass
class Fault:
    """What goes wrong with the next ``times`` matching requests: a ``status``, or a cut after so many bytes."""

    method: str
    path: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: object = field(default_factory=dict)
    cut: int | None = None
    times: int = 1

    def takes(self, method: str, path: str) -> bool:
        if self.times and method == self.method and re.search(self.path, path):
            self.times -= 1
            return True
        return False


@dataclass
class Repo:
    private: bool
    owner: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    pulls: int = 0

    def commit(self, files: dict[str, bytes], message: str, branch: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class HubServer(http.server.ThreadingHTTPServer):
    """The server and its memory: ``repos`` by id, ``objects`` by SHA-256, every request in ``seen``, ``faults``.
    ``leaks``: requests for stored files that came with a token. ``ranges``: downloads of the rest of a file.
    ``before``: called before a request is carried out. ``turn``: one request at a time, alike in every run."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.seen: list[str] = []
        self.leaks: list[str] = []
        self.ranges = 0
        self.before: Callable[[], object] = lambda: None
        self.turn = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def start(self) -> HubServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def clear(self) -> None:
        for memory in (self.repos, self.objects, self.faults, self.seen, self.leaks):
            memory.clear()
        self.ranges = 0
        self.before = lambda: None

    def add(self, name: str, files: dict[str, bytes], *, private: bool = True) -> Repo:
        repo = self.repos[name] = Repo(private, name.partition("/")[0])
        repo.commit({".gitattributes": b"*.safetensors filter=lfs\n"} | files, "initial", "main")
        return repo

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repos[name]
        oid = repo.resolve(revision)
        assert oid is not None
        return {path: data for path, data in repo.commits[oid].items() if path != ".gitattributes"}

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.seen)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that clients or faults broke."""


class Refused(Exception):
    """A status, the Hub's code of an error, None to send no header of it, and a message."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    ROUTES: tuple[tuple[str, str, str], ...] = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)/?", "tree"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "receive"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})", "cdn"),
    )

    def do_GET(self) -> None:
        with self.server.turn:
            self.serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        self.limit: int | None = None
        self.server.seen.append(f"{self.command} {self.path}")
        fault = next((f for f in self.server.faults if f.takes(self.command, self.path)), None)
        size = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.cut is not None and self.command == "PUT":
            self.rfile.read(min(fault.cut, size))
            self.hang_up()
            return
        self.body = self.rfile.read(size)
        if fault is not None and fault.status:
            self.reply(fault.status, fault.body, fault.headers)
            return
        if fault is not None and self.command == "GET":
            self.limit = fault.cut
        self.server.before()
        method = self.command.replace("HEAD", "GET")
        matches = [(re.fullmatch(pattern, url.path), name) for verb, pattern, name in self.ROUTES if verb == method]
        try:
            match, name = next(((match, name) for match, name in matches if match), (None, ""))
            if match is None:
                raise Refused(404, "", "Not found")
            found = {key: urllib.parse.unquote(value or "") for key, value in match.groupdict().items()}
            getattr(self, name)(**found)
        except Refused as refused:
            status, code, message = refused.args
            headers = {} if code is None else {"X-Error-Message": message, "X-Error-Code": code}
            self.reply(status, {"error": message}, headers)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def reply(self, status: int, data: object = None, headers: dict[str, str] | None = None) -> None:
        """Send a status, headers, and data (bytes as they are, everything else as JSON)."""
        content = data if isinstance(data, bytes) else json.dumps({} if data is None else data).encode()
        sent = {"Content-Type": "application/json", "Content-Length": str(len(content))} | (headers or {})
        self.send_response(status)
        for key, value in sent.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[: self.limit])
        if self.limit is not None:
            self.wfile.flush()
            self.hang_up()

    def json(self) -> Any:
        return json.loads(self.body)

    def user(self) -> tuple[str, bool] | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        if (token := header.removeprefix("Bearer ")) not in USERS:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return USERS[token]

    def allowed(self, repo: str, revision: str = "main", *, write: bool = False) -> tuple[Repo, str]:
        user = self.user()
        found = self.server.repos.get(repo)
        if found is None or (found.private and (user is None or user[0] != found.owner)):
            raise Refused(401 if user is None else 404, "RepoNotFound", "Repository not found")
        if write and user != (found.owner, True) and "create_pr" not in self.query:
            # In the body alone: the client's HTTP library logs headers of answers.
            raise Refused(403, None, f"No rights to write to {repo} with {self.headers.get('Authorization')}")
        oid = found.resolve(revision)
        if oid is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found, oid

    def whoami(self) -> None:
        self.reply(200, {"name": self.writer()[0], "type": "user"})

    def writer(self) -> tuple[str, bool]:
        user = self.user()
        if user is None:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return user

    def create(self) -> None:
        asked, user = self.json(), self.writer()
        name = f"{asked.get('organization') or user[0]}/{asked['name']}"
        if name in self.server.repos:
            self.reply(409, {"error": "You already created this model repo", "url": f"{self.server.endpoint}/{name}"})
            return
        if not user[1] or name.partition("/")[0] != user[0]:
            raise Refused(403, "", f"You don't have the rights to create a model under the namespace of {name}")
        self.server.add(name, {}, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        self.reply(200, {"url": f"{self.server.endpoint}/{name}", "name": name})

    def validate(self) -> None:
        """Refuse a model card whose front matter is no YAML or has another licence than the Hub knows."""
        try:
            known = ModelCard(self.json()["content"]).data.get("license", "mit") in LICENCES
            errors = [] if known else [f'"license" must be one of {LICENCES}']
        except (ValueError, yaml.YAMLError) as error:
            errors = [str(error)]
        self.reply(400 if errors else 200, {"errors": [{"message": e} for e in errors], "warnings": []})

    def info(self, repo: str, revision: str) -> None:
        found, oid = self.allowed(repo, revision or "main")
        siblings = [{"rfilename": path} for path in found.commits[oid]]
        self.reply(200, {"id": repo, "modelId": repo, "sha": oid, "private": found.private, "siblings": siblings})

    def tree(self, repo: str, revision: str) -> None:
        found, oid = self.allowed(repo, revision)
        entries: list[dict[str, Any]] = []
        for path, data in found.commits[oid].items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
            if path.endswith(LARGE):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
            entries.append(entry)
        self.reply(200, entries)

    def preupload(self, repo: str, revision: str) -> None:
        found, oid = self.allowed(repo, revision, write=True)
        here, answer = found.commits[oid], []
        for file in self.json()["files"]:
            path, base64_ok = file["path"], base64.b64decode(file["sample"])
            assert len(base64_ok) <= 512
            mode = "lfs" if path.endswith(LARGE) else "regular"
            entry = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in here:
                data = here[path]
                entry["oid"] = hashlib.sha256(data).hexdigest() if mode == "lfs" else git_oid(data)
            answer.append(entry)
        self.reply(200, {"files": answer})

    def batch(self, repo: str) -> None:
        # The URL of the batch has no query, so a pull request is told by nothing: reading is enough, as on the Hub.
        self.allowed(repo)
        asked = self.json()
        assert "basic" in asked["transfers"] and asked["operation"] == "upload"
        objects = []
        for entry in asked["objects"]:
            answer: dict[str, Any] = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in self.server.objects:
                href = self.server.endpoint.replace("127.0.0.1", "localhost")
                answer["actions"] = {"upload": {"href": f"{href}/lfs/{entry['oid']}"}}
            objects.append(answer)
        self.reply(200, {"transfer": "basic", "objects": objects})

    def receive(self, oid: str) -> None:
        if self.headers.get("Authorization"):
            self.server.leaks.append(self.path)
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refused(400, "", "the content does not have this hash")
        self.server.objects[oid] = self.body
        self.reply(200)

    def commit(self, repo: str, revision: str) -> None:
        found, parent = self.allowed(repo, revision, write=True)
        files, message = dict(found.commits[parent]), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", parent) != parent:
                    raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:  # "lfsFile"; the program deletes nothing
                if value["oid"] not in self.server.objects:
                    raise Refused(400, "", f"LFS pointer of {value['path']} points to a file that does not exist")
                files[value["path"]] = self.server.objects[value["oid"]]
        branch, pull = revision, None
        if "create_pr" in self.query:
            found.pulls += 1
            branch = f"refs/pr/{found.pulls}"
            pull = f"{self.server.endpoint}/{repo}/discussions/{found.pulls}"
        oid = found.commit(files, message, branch)
        url = f"{self.server.endpoint}/{repo}/commit/{oid}"
        self.reply(200, {"success": True, "commitOid": oid, "commitUrl": url, "pullRequestUrl": pull, "hookOutput": ""})

    def resolve(self, repo: str, revision: str, path: str) -> None:
        found, oid = self.allowed(repo, revision)
        data = found.commits[oid].get(path)
        if data is None:
            self.reply(404, None, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid})
            return
        headers = {"X-Repo-Commit": oid, "ETag": f'"{git_oid(data)}"'}
        if path.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            self.server.objects[digest] = data
            elsewhere = self.server.endpoint.replace("127.0.0.1", "localhost")
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            self.reply(302, b"", headers | {"Location": f"{elsewhere}/cdn/{digest}"})
            return
        self.send(data, headers)

    def cdn(self, oid: str) -> None:
        if self.headers.get("Authorization"):
            self.server.leaks.append(self.path)
        self.send(self.server.objects[oid], {"ETag": f'"{oid}"'})

    def send(self, data: bytes, headers: dict[str, str]) -> None:
        """Send a file, or the part of it that ``Range`` asks for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None:
            self.reply(200, data, headers | {"Accept-Ranges": "bytes"})
            return
        self.server.ranges += 1
        begin, end = int(match[1]), int(match[2] or len(data) - 1)
        self.reply(206, data[begin : end + 1], headers | {"Content-Range": f"bytes {begin}-{end}/{len(data)}"})


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
