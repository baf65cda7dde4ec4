"""As much of the Hub as a download needs, on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COMMIT = "1" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a download needs; ``server.repo`` has the files of its one good repository."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self) -> None:
        repo: dict[str, bytes] = self.server.repo  # type: ignore[attr-defined]
        if "org/gated" in self.path:
            self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        elif "nope" in self.path:
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif "/revision/" in self.path and "org/good" in self.path:
            siblings = [{"rfilename": name} for name in repo]
            self.reply(200, json.dumps({"id": "org/good", "sha": COMMIT, "siblings": siblings}).encode())
        elif "/tree/" in self.path:
            files = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in repo.items()]
            self.reply(200, json.dumps(files).encode())
        elif "/resolve/" in self.path and self.path.split(f"{COMMIT}/")[1] in repo:
            data = repo[self.path.split(f"{COMMIT}/")[1]]
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self.reply(200, data, {"X-Repo-Commit": COMMIT, "ETag": etag})
        else:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})

    def reply(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@contextmanager
def serving() -> Iterator[http.server.ThreadingHTTPServer]:
    """Serve until the block ends; what the block sets as ``repo`` is what there is."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
