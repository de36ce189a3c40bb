"""A Hub on loopback, as far as huggingface_hub 2.4 speaks to one when it pushes, and datasets 5.2
when it reads.

Models are under their id, data sets under `datasets/ID`, as in the Hub's addresses. A commit whose
card huggingface_hub cannot read is refused. It keeps real commits: a file is in one only if its
bytes arrived, base64 in the commit or by LFS upload with the right sha256. It answers as the Hub
does where that matters (401, 404 with `X-Error-Code`, 409), counts what it received, and can be
told to fail, or to keep a client waiting before or after it has done what it was asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
from huggingface_hub import DatasetCard, ModelCard, close_session

from pipeline.cli.app import main

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
        return self.shas[-1]

    @property
    def shas(self) -> list[str]:
        """The commits' names, oldest first."""
        shas = []
        for number, files in enumerate(self.commits, 1):
            content = [
                (name, hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())
            ]
            shas.append(hashlib.sha1(json.dumps([number, content]).encode()).hexdigest())
        return shas


class HubStandIn:
    """Use as a context manager; `endpoint` is its address."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.bytes_uploaded = 0
        self.failures: dict[
            str, int
        ] = {}  # part of a "METHOD /path" -> status that it is answered with
        self.stalls_before = self.stalls_after = (
            ""  # part of a "METHOD /path" that is not carried out, or not answered
        )
        self.stalled, self.gone = (
            threading.Event(),
            threading.Event(),
        )  # a client waits; it waits no longer

    def __enter__(self) -> HubStandIn:
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def hub_on_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    """A stand-in that huggingface_hub takes for the Hub, with a token that may write; what fixtures
    yield from.
    """
    with HubStandIn() as stand_in:
        take_for_the_hub(monkeypatch, stand_in.endpoint, tmp_path)
        yield stand_in
    close_session()


def take_for_the_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, tmp_path: Path) -> None:
    """Let this process's huggingface_hub speak to this address, with a token that may write."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()


def push_to(endpoint: str, config: Path) -> None:
    """Run the command line in this process with the Hub at `endpoint`."""
    take_for_the_hub(pytest.MonkeyPatch(), endpoint, config.parent)
    sys.argv = ["medusa-distill", "run", str(config), "--executor", "inline"]
    main()


class _Handler(BaseHTTPRequestHandler):
    stand_in: HubStandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
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
        failing = next(
            (status for part, status in self.stand_in.failures.items() if part in request), None
        )
        if failing:
            # a careless server quotes the token
            said = f"cannot, {self.headers.get('Authorization', 'anonymous')}"
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
        if not path.startswith("/api/"):
            return self._resolve(unquote(path).strip("/"))
        if not path.startswith(("/api/models/", "/api/datasets/")):
            return self._send(404, {"error": "Not found"})
        kind, owner, name, *action = path.removeprefix("/api/").split("/")
        place = {"models": "", "datasets": "datasets/"}[kind]
        return self._repository(f"{place}{owner}/{name}", action, body)

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
        repo_id = f"{'datasets/' if asked.get('type') == 'dataset' else ''}{asked['organization']}/{asked['name']}"  # noqa: E501
        url = {"url": f"{self.stand_in.endpoint}/{repo_id}"}
        if repo_id in self.stand_in.repositories:
            return self._send(409, url | {"error": "You already created this model repo"})
        self.stand_in.repositories[repo_id] = Repository(
            private=asked.get("visibility") == "private"
        )
        return self._send(200, url)

    def _repository(self, repo_id: str, action: list[str], body: bytes) -> None:
        repository = self.stand_in.repositories.get(repo_id)
        if repository is None:
            return self._send(
                404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            )
        what = action[0] if action else ""
        if what == "preupload":
            asked = json.loads(body)["files"]
            return self._send(
                200, {"files": [self._upload_mode(file["path"], repository) for file in asked]}
            )
        if what == "commit":
            return self._commit(
                repo_id, repository, [json.loads(line) for line in body.splitlines()]
            )
        if what == "tree":
            return self._tree(repository, "/".join(action[2:]))
        siblings = [{"rfilename": name} for name in repository.files]
        of_a_data_set = {
            "author": repo_id.split("/")[-2],
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "gated": False,
        }
        known = {
            "id": repo_id.removeprefix("datasets/"),
            "private": repository.private,
            "sha": repository.sha,
        }
        return self._send(200, {**known, "siblings": siblings, "disabled": False, **of_a_data_set})

    def _tree(self, repository: Repository, folder: str) -> None:
        """The files below a folder; 404 where there is none, as the Hub has it."""
        inside = {
            name: data
            for name, data in repository.files.items()
            if name.startswith(f"{folder}/" if folder else "")
        }
        if folder and not inside:
            return self._send(404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})
        files = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in inside.items()
        ]
        folders = {name.rpartition("/")[0] for name in inside} - {folder, ""}
        below = [
            {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
            for name in sorted(folders)
        ]
        return self._send(200, files + below)

    def _resolve(self, path: str) -> None:
        """A file's bytes: `OWNER/NAME/resolve/REVISION/FILE`, behind `datasets/` for a data
        set's.
        """
        repo_id, _, rest = path.partition("/resolve/")
        repository, (revision, _, name) = (
            self.stand_in.repositories.get(repo_id),
            rest.partition("/"),
        )
        if repository is None:
            return self._send(
                404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            )
        commit = repository.sha if revision == "main" else revision
        if commit not in repository.shas:
            return self._send(
                404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"}
            )
        files, sha = repository.commits[repository.shas.index(commit)], {"X-Repo-Commit": commit}
        if name not in files:
            return self._send(
                404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", **sha}
            )
        data = files[name]
        return self._send(200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', **sha})

    def _upload_mode(self, path: str, repository: Repository) -> dict:
        mode, content = (
            "lfs" if path.endswith((".safetensors", ".parquet")) else "regular",
            repository.files.get(path),
        )
        oid = None
        if content is not None:
            blob = b"blob %d\0" % len(content) + content
            oid = (
                hashlib.sha256(content).hexdigest()
                if mode == "lfs"
                else hashlib.sha1(blob).hexdigest()
            )
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _batch(self, asked: dict) -> None:
        objects = [dict(item) for item in asked["objects"]]
        for item in objects:
            if item["oid"] not in self.stand_in.lfs:
                item["actions"] = {
                    "upload": {"href": f"{self.stand_in.endpoint}/lfs/{item['oid']}"}
                }
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
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] != "header":
                return self._send(400, {"error": f"unexpected {line['key']}"})
        if (said := _wrong_with_the_card(repo_id, files.get("README.md"))) is not None:
            return self._send(400, {"error": said})
        repository.commits.append(files)
        url = f"{self.stand_in.endpoint}/{repo_id}/commit/{repository.sha}"
        return self._send(200, {"commitUrl": url, "commitOid": repository.sha})

    def _keep_waiting(self) -> None:
        self.stand_in.stalled.set()
        self.stand_in.gone.wait(120)
        self.close_connection = True

    def _send(self, status: int, content: dict | list | bytes, headers: dict | None = None) -> None:
        if (
            self.stand_in.stalls_after
            and self.stand_in.stalls_after in f"{self.command} {self.path}"
        ):
            return self._keep_waiting()
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _wrong_with_the_card(repo_id: str, card: bytes | None) -> str | None:
    """What huggingface_hub finds wrong with a card's metadata."""
    kind = DatasetCard if repo_id.startswith("datasets/") else ModelCard
    try:
        kind((card or b"").decode())
    except ValueError as error:
        return str(error)
    return None
