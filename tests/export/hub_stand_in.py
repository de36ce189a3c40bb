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
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    def files(self):
        return self.commits[-1]

    @property
    def sha(self):
        return self.shas[-1]

    @property
    def shas(self):
        """The commits' names, oldest first."""
        shas = []
        for number, files in enumerate(self.commits):
            content = f"{number} {sorted(files.items())}"
            shas.append(hashlib.sha1(content.encode()).hexdigest())
        return shas


class HubStandIn:
    """Use as a context manager; `endpoint` is its address.

    Attributes:
        failures: A part of "METHOD /path" -> the status that it is answered with.
        stalls_before, stalls_after: A part of "METHOD /path" that is not carried out, or not
            answered; `stalled` is set while a client waits, until `gone` is set.
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.bytes_uploaded = 0
        self.failures: dict[str, int] = {}
        self.stalls_before = self.stalls_after = ""
        self.stalled, self.gone = threading.Event(), threading.Event()

    @property
    def fetched(self):
        """The names of the files whose bytes were asked for."""
        gets = [request for request in self.requests if request.startswith("GET /")]
        return [request.rpartition("/")[2] for request in gets if "/resolve/" in request]

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()


def hub_on_loopback(monkeypatch, tmp_path):
    """A stand-in that huggingface_hub takes for the Hub, with a token that may write; what fixtures
    yield from.
    """
    with HubStandIn() as stand_in:
        take_for_the_hub(monkeypatch, stand_in.endpoint, tmp_path)
        yield stand_in
    close_session()


def take_for_the_hub(monkeypatch, endpoint, tmp_path):
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


def push_to(endpoint, config):
    """Run the command line in this process with the Hub at `endpoint`."""
    take_for_the_hub(pytest.MonkeyPatch(), endpoint, config.parent)
    sys.argv = ["medusa-distill", "run", str(config), "--executor", "inline"]
    main()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self):
        body, path = self._body(), urlsplit(self.path).path
        request = f"{self.command} {path}"
        self.hub.requests.append(request)
        for part, status in self.hub.failures.items():
            if part in request:  # a careless server quotes the token
                token = self.headers.get("Authorization", "anonymous")
                return self._send(status, {"error": f"cannot, {token}"})
        if self.hub.stalls_before and self.hub.stalls_before in request:
            return self._keep_waiting()
        if path.startswith("/lfs/"):
            return self._store(path.removeprefix("/lfs/"), body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid user token."})
        return self._serve(path, body)

    def _serve(self, path, body):
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body)["objects"])
        if not path.startswith("/api/"):
            return self._resolve(unquote(path).strip("/"))
        if not path.startswith(("/api/models/", "/api/datasets/")):
            return self._send(404, {"error": "Not found"})
        kind, owner, name, *action = path.removeprefix("/api/").split("/")
        place = {"models": "", "datasets": "datasets/"}[kind]
        return self._repository(f"{place}{owner}/{name}", action, body)

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _create(self, asked):
        place = "datasets/" if asked.get("type") == "dataset" else ""
        repo_id = f"{place}{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.endpoint}/{repo_id}"}
        if repo_id in self.hub.repositories:
            return self._send(409, url | {"error": "You already created this model repo"})
        self.hub.repositories[repo_id] = Repository(asked.get("visibility") == "private")
        return self._send(200, url)

    def _repository(self, repo_id, action, body):
        repository = self.hub.repositories.get(repo_id)
        if repository is None:
            return self._missing("RepoNotFound")
        what = action[0] if action else ""
        if what == "preupload":
            asked = json.loads(body)["files"]
            modes = [_upload_mode(file["path"], repository) for file in asked]
            return self._send(200, {"files": modes})
        if what == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            return self._commit(repo_id, repository, lines)
        if what == "tree":
            return self._tree(repository, "/".join(action[2:]))
        known = {
            "id": repo_id.removeprefix("datasets/"),
            "private": repository.private,
            "sha": repository.sha,
            "siblings": [{"rfilename": name} for name in repository.files],
        }
        unread = {"author": "", "tags": [], "downloads": 0, "likes": 0, "gated": False}
        return self._send(200, known | unread | {"disabled": False})

    def _tree(self, repository, folder):
        """The files and folders below a folder; 404 where there is none."""
        prefix = f"{folder}/" if folder else ""
        entries, folders = [], set()
        for name, data in repository.files.items():
            if name.startswith(prefix):
                oid = hashlib.sha1(data).hexdigest()
                entries.append({"type": "file", "path": name, "size": len(data), "oid": oid})
                folders.add(name.rpartition("/")[0])
        if folder and not entries:
            return self._missing("EntryNotFound")
        for name in sorted(folders - {folder, ""}):
            entries.append({"type": "directory", "path": name, "size": 0, "oid": "0" * 40})
        return self._send(200, entries)

    def _resolve(self, path):
        """A file's bytes: `OWNER/NAME/resolve/REVISION/FILE`, of a data set with `datasets/`."""
        repo_id, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        repository = self.hub.repositories.get(repo_id)
        if repository is None:
            return self._missing("RepoNotFound")
        commit = repository.sha if revision == "main" else revision
        if commit not in repository.shas:
            return self._missing("RevisionNotFound")
        data = repository.commits[repository.shas.index(commit)].get(name)
        if data is None:
            return self._missing("EntryNotFound", commit)
        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        return self._send(200, data, {"ETag": tag, "X-Repo-Commit": commit})

    def _batch(self, objects):
        for item in objects:
            if item["oid"] not in self.hub.lfs:
                href = f"{self.hub.endpoint}/lfs/{item['oid']}"
                item["actions"] = {"upload": {"href": href}}
        self._send(200, {"transfer": "basic", "objects": objects})

    def _store(self, oid, body):
        if hashlib.sha256(body).hexdigest() != oid:
            return self._send(400, {"error": "sha256 mismatch"})
        self.hub.lfs[oid] = body
        self.hub.bytes_uploaded += len(body)
        return self._send(200, {})

    def _commit(self, repo_id, repository, lines):
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.lfs:
                    return self._send(400, {"error": f"{value['path']} was never uploaded"})
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        kind = DatasetCard if repo_id.startswith("datasets/") else ModelCard
        try:
            kind(files.get("README.md", b"").decode())
        except ValueError as error:
            return self._send(400, {"error": str(error)})
        repository.commits.append(files)
        url = f"{self.hub.endpoint}/{repo_id}/commit/{repository.sha}"
        return self._send(200, {"commitUrl": url, "commitOid": repository.sha})

    def _keep_waiting(self):
        self.hub.stalled.set()
        self.hub.gone.wait(120)
        self.close_connection = True

    def _missing(self, what, commit=""):
        headers = {"X-Error-Code": what, "X-Repo-Commit": commit}
        self._send(404, {"error": what}, headers)

    def _send(self, status, content, headers=None):
        stalls = self.hub.stalls_after
        if stalls and stalls in f"{self.command} {self.path}":
            return self._keep_waiting()
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        return None


def _upload_mode(path, repository):
    content = repository.files.get(path)
    is_lfs = path.endswith((".safetensors", ".parquet"))
    oid = None
    if content is not None and is_lfs:
        oid = hashlib.sha256(content).hexdigest()
    elif content is not None:
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    mode = "lfs" if is_lfs else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}
