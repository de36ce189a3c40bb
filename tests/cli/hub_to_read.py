"""A Hub on loopback that serves one directory as one repository, as far as huggingface_hub reads
from one.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

REPOSITORY = "owner/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubToRead:
    """`endpoint` is its address; `fetched` the names of the files whose bytes were asked for."""

    def __init__(self, endpoint: str, directory: Path):
        self.endpoint, self.directory = endpoint, directory
        self.fetched: list[str] = []


def digest(file: Path) -> str:
    """The file's sha256 (hex), which the cache names it by."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def serve(directory: Path) -> Iterator[HubToRead]:
    """Serve `directory` as `REPOSITORY` at `COMMIT`."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = urlsplit(self.path).path
            file = directory / path.rpartition("/")[2]
            if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
                tree = [
                    {
                        "type": "file",
                        "path": file.name,
                        "size": file.stat().st_size,
                        "oid": digest(file),
                    }
                    for file in sorted(directory.iterdir())
                ]
                self._send(200, json.dumps(tree).encode(), {})
            elif path.startswith(f"/api/models/{REPOSITORY}"):
                self._send(200, json.dumps({"id": REPOSITORY, "sha": COMMIT}).encode(), {})
            elif not path.startswith(f"/{REPOSITORY}/resolve/") or not file.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                data = file.read_bytes()
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest(file)}"'}
                if with_body:
                    hub.fetched.append(file.name)
                self._send(200, data, headers, with_body=with_body)

        def _send(
            self, status: int, data: bytes, headers: dict[str, str], *, with_body: bool = True
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = HubToRead(f"http://127.0.0.1:{server.server_address[1]}", directory)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
