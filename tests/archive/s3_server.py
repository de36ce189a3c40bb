"""A bucket on the loopback, in S3's protocol as pyarrow speaks it: path-style addresses, signed requests, HEAD, GET,
PUT (also in signed chunks), multipart uploads, DELETE, ListObjectsV2.

Requests that are signed with another key, or not at all, are refused as S3 refuses them. Signatures themselves are not
recomputed. Written from Amazon's API reference.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY = "AKIDEXAMPLE"
NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class Bucket:
    """What is stored, by key, and what was asked for; `fail` may refuse a request before it does anything."""

    def __init__(self, name: str = "bucket"):
        self.name = name
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.numbers = itertools.count()
        self.puts: list[str] = []
        self.fail = lambda method, key: False
        bucket = self

        class Handler(Requests):
            pass

        Handler.bucket = bucket
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def address(self, path: str) -> str:
        host, port = self._server.server_address[:2]
        return f"s3://{self.name}/{path}?region=us-east-1&scheme=http&endpoint_override={host}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Requests(BaseHTTPRequestHandler):
    bucket: Bucket
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = -1, True  # an answer is one packet: two wait for each other

    def log_message(self, *_: object) -> None: ...

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()  # the client waits a second for it
        return True

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        _, name, *rest = unquote(parts.path).split("/", 2)
        key, query = (rest or [""])[0], {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self._body()
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            return self._refuse(403, "InvalidAccessKeyId", "The AWS access key Id you provided does not exist.")
        if self.bucket.fail(self.command, key):
            return self._refuse(403, "AccessDenied", "Access Denied")
        if name != self.bucket.name:
            return self._refuse(404, "NoSuchBucket", "The specified bucket does not exist")
        return getattr(self, f"on_{self.command.lower()}")(key, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def on_head(self, key: str, query: dict[str, str], body: bytes) -> None:
        if key and key not in self.bucket.objects:
            return self._answer(404)
        return self._object(key) if key else self._answer(200)

    def on_get(self, key: str, query: dict[str, str], body: bytes) -> None:
        if not key:
            return self._list(query)
        if key not in self.bucket.objects:
            return self._refuse(404, "NoSuchKey", "The specified key does not exist.")
        return self._object(key)

    def on_put(self, key: str, query: dict[str, str], body: bytes) -> None:
        tag = {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        if "partNumber" in query:
            self.bucket.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return self._answer(200, headers=tag)
        self.bucket.objects[key] = body
        self.bucket.puts.append(key)
        return self._answer(200, headers=tag)

    def on_post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            upload = f"upload-{next(self.bucket.numbers)}"
            self.bucket.uploads[upload] = {}
            named = f"<Bucket>{self.bucket.name}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            return self._xml(f"<InitiateMultipartUploadResult {NAMESPACE}>{named}</InitiateMultipartUploadResult>")
        assert "uploadId" in query, query
        parts = self.bucket.uploads.pop(query["uploadId"])
        wanted = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        self.bucket.objects[key] = b"".join(parts[number] for number in wanted)
        self.bucket.puts.append(key)
        named = f"<Key>{escape(key)}</Key><ETag>&quot;whole&quot;</ETag>"
        return self._xml(f"<CompleteMultipartUploadResult {NAMESPACE}>{named}</CompleteMultipartUploadResult>")

    def on_delete(self, key: str, query: dict[str, str], body: bytes) -> None:
        self.bucket.uploads.pop(query.get("uploadId", ""), None)
        self.bucket.objects.pop(key, None)
        self._answer(204)

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found, folders = [], set()
        for key in sorted(self.bucket.objects):
            if key.startswith(prefix):
                rest = key.removeprefix(prefix)
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                else:
                    found.append(key)
        listed = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.bucket.objects[key])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in found
        )
        listed += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        count = f"<KeyCount>{len(found) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._xml(f"<ListBucketResult {NAMESPACE}><Prefix>{escape(prefix)}</Prefix>{count}{listed}</ListBucketResult>")

    def _object(self, key: str) -> None:
        content, code, headers = self.bucket.objects[key], 200, {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
            code, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        self._answer(code, content, headers | {"ETag": '"x"', "Accept-Ranges": "bytes"})

    def _body(self) -> bytes:
        """The request's content; one in signed chunks is put together."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if not self.headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            return body
        content = b""
        while body:
            head, _, body = body.partition(b"\r\n")
            size = int(head.partition(b";")[0], 16)
            if not size:
                break
            content, body = content + body[:size], body[size + 2 :]
        assert len(content) == int(self.headers["x-amz-decoded-content-length"])
        return content

    def _refuse(self, code: int, name: str, message: str) -> None:
        self._xml(f"<Error><Code>{name}</Code><Message>{message}</Message></Error>", code)

    def _xml(self, content: str, code: int = 200) -> None:
        document = f'<?xml version="1.0" encoding="UTF-8"?>\n{content}'.encode()
        self._answer(code, document, {"Content-Type": "application/xml"})

    def _answer(self, code: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
