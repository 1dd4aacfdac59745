"""As much of a Hub as `huggingface_hub` needs to make a model or kernel repository, commit to it and download from it."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LoopbackHub:
    """
    A server on 127.0.0.1 for the real client (`HF_ENDPOINT=hub.url`). `hub.files[repo_id][path]` holds the contents.
    `hub.branches[repo_id]` are the branches
    that were made, but it keeps one revision a repository; and it takes small files only (no LFS, no Xet).
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, set[str]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def sha(self, repo_id: str) -> str:
        """A commit id that changes with the contents, as the client's cache expects."""
        contents = repr(sorted(self.files[repo_id].items()))
        return hashlib.sha1(contents.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_json(self, **values: object) -> None:
        self.reply(200, json.dumps(values).encode(), Content_Type="application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            request = json.loads(body)
            repo_id = "/".join(filter(None, (request.get("organization"), request["name"])))
            self.hub.files.setdefault(repo_id, {})
            return self.reply_json(url=f"{self.hub.url}/{repo_id}", id=repo_id, name=repo_id)
        if self.path == "/api/validate-yaml":
            return self.reply_json(errors=[], warnings=[])
        repo_id, action, revision = re.fullmatch(
            r"/api/(?:models|kernels)/([^/]+/[^/]+)/(preupload|commit|branch)/([^/?]+)(?:\?.*)?", self.path
        ).groups()
        if action == "branch":
            self.hub.branches.setdefault(repo_id, set()).add(revision)
            return self.reply_json()
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self.reply_json(files=[{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.hub.files[repo_id][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        sha = self.hub.sha(repo_id)
        self.reply_json(success=True, commitOid=sha, commitUrl=f"{self.hub.url}/{repo_id}/commit/{sha}")

    def do_GET(self) -> None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+?)(?:\?.*)?", self.path)
        repo_id, path = match.groups() if match else ("", "")
        if repo_id not in self.hub.files:
            return self.reply(404, b"", X_Error_Code="RepoNotFound")
        sha = self.hub.sha(repo_id)
        if path not in self.hub.files[repo_id]:
            return self.reply(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        content = self.hub.files[repo_id][path]
        etag = hashlib.sha1(content).hexdigest()
        self.reply(200, content, ETag=f'"{etag}"', X_Repo_Commit=sha)

    do_HEAD = do_GET
