"""A Hub of model repositories on loopback, as far as huggingface_hub 2.4 speaks to one when it pushes.

It keeps real commits: a file is in one only if its bytes arrived, base64 in the commit or by LFS upload with the right
sha256. It answers as the Hub does where that matters (401, 404 with `X-Error-Code`, 409), counts what it received, and
can be told to fail, or to keep a client waiting before or after it has done what it was asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.constants
import pytest
from huggingface_hub import close_session

TOKEN = "hf_standInTokenThatMayWrite"


@dataclass
class Repository:
    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{}])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    @property
    def sha(self) -> str:
        content = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(self.files.items())]
        return hashlib.sha1(json.dumps([len(self.commits), content]).encode()).hexdigest()


class HubStandIn:
    """Use as a context manager; `endpoint` is its address."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.bytes_uploaded = 0
        self.failures: dict[str, int] = {}  # part of a "METHOD /path" -> status that it is answered with
        self.stalls_before = self.stalls_after = ""  # part of a "METHOD /path" that is not carried out, or not answered
        self.stalled, self.gone = threading.Event(), threading.Event()  # a client waits; it waits no longer

    def __enter__(self) -> HubStandIn:
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def hub_on_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    """A stand-in that huggingface_hub takes for the Hub, with a token that may write; what fixtures yield from."""
    with HubStandIn() as stand_in:
        take_for_the_hub(monkeypatch, stand_in.endpoint, tmp_path)
        yield stand_in
    close_session()


def take_for_the_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, tmp_path: Path) -> None:
    """Let this process's huggingface_hub speak to this address, with a token that may write."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()


class _Handler(BaseHTTPRequestHandler):
    stand_in: HubStandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        body, path = self._body(), urlsplit(self.path).path
        request = f"{self.command} {path}"
        self.stand_in.requests.append(request)
        failing = next((status for part, status in self.stand_in.failures.items() if part in request), None)
        if failing:
            said = f"cannot, {self.headers.get('Authorization', 'anonymous')}"  # a careless server quotes the token
            return self._send(failing, {"error": said})
        if self.stand_in.stalls_before and self.stand_in.stalls_before in request:
            return self._keep_waiting()
        if path.startswith("/lfs/"):
            return self._store(path.removeprefix("/lfs/"), body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid user token."})
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        repo_id, _, action = path.removeprefix("/api/models/").partition("/")
        name, _, action = action.partition("/")
        return self._repository(f"{repo_id}/{name}", action.split("/")[0], body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _create(self, asked: dict) -> None:
        repo_id = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.stand_in.endpoint}/{repo_id}"}
        if repo_id in self.stand_in.repositories:
            return self._send(409, url | {"error": "You already created this model repo"})
        self.stand_in.repositories[repo_id] = Repository(private=asked.get("visibility") == "private")
        return self._send(200, url)

    def _repository(self, repo_id: str, action: str, body: bytes) -> None:
        repository = self.stand_in.repositories.get(repo_id)
        if repository is None:
            return self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if action == "preupload":
            asked = json.loads(body)["files"]
            return self._send(200, {"files": [self._upload_mode(file["path"], repository) for file in asked]})
        if action == "commit":
            return self._commit(repo_id, repository, [json.loads(line) for line in body.splitlines()])
        siblings = [{"rfilename": name} for name in repository.files]
        return self._send(
            200, {"id": repo_id, "private": repository.private, "sha": repository.sha, "siblings": siblings}
        )

    def _upload_mode(self, path: str, repository: Repository) -> dict:
        mode, content = "lfs" if path.endswith(".safetensors") else "regular", repository.files.get(path)
        oid = None
        if content is not None:
            blob = b"blob %d\0" % len(content) + content
            oid = hashlib.sha256(content).hexdigest() if mode == "lfs" else hashlib.sha1(blob).hexdigest()
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _batch(self, asked: dict) -> None:
        objects = [dict(item) for item in asked["objects"]]
        for item in objects:
            if item["oid"] not in self.stand_in.lfs:
                item["actions"] = {"upload": {"href": f"{self.stand_in.endpoint}/lfs/{item['oid']}"}}
        self._send(200, {"transfer": "basic", "objects": objects})

    def _store(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._send(400, {"error": "sha256 mismatch"})
        self.stand_in.lfs[oid] = body
        self.stand_in.bytes_uploaded += len(body)
        return self._send(200, {})

    def _commit(self, repo_id: str, repository: Repository, lines: list[dict]) -> None:
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.stand_in.lfs:
                    return self._send(400, {"error": f"{value['path']} was never uploaded"})
                files[value["path"]] = self.stand_in.lfs[value["oid"]]
            elif line["key"] != "header":
                return self._send(400, {"error": f"unexpected {line['key']}"})
        repository.commits.append(files)
        url = f"{self.stand_in.endpoint}/{repo_id}/commit/{repository.sha}"
        return self._send(200, {"commitUrl": url, "commitOid": repository.sha})

    def _keep_waiting(self) -> None:
        self.stand_in.stalled.set()
        self.stand_in.gone.wait(120)
        self.close_connection = True

    def _send(self, status: int, content: dict, headers: dict | None = None) -> None:
        if self.stand_in.stalls_after and self.stand_in.stalls_after in f"{self.command} {self.path}":
            return self._keep_waiting()
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
