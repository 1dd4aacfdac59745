"""As much of a Hub as `huggingface_hub` needs to make model and kernel repositories, commit to them and download from them."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


TOKEN = "hf_test"
USER = "someone"
LFS_BYTES = 10_000  # larger files, and weights, go through LFS, as on the Hub


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose method and path match `pattern`."""

    pattern: str
    times: int
    status: int | None  # None drops the connection in the middle of the request's body


@dataclass
class LoopbackHub:
    """
    A server on 127.0.0.1 for the real client (`HF_ENDPOINT=hub.url`, `HF_TOKEN=TOKEN`). `hub.files[repo_id][path]` holds
    the contents, `hub.commits[repo_id]` the messages. It keeps one revision a repository.

    Writing needs the token, and so does reading a repository in `hub.private`. `hub.fail(...)` injects faults.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, list[str]] = field(default_factory=dict)
    branches: dict[str, set[str]] = field(default_factory=dict)  # that were made; all have the same contents
    private: set[str] = field(default_factory=set)
    stored: dict[str, bytes] = field(default_factory=dict)  # LFS objects by their SHA-256
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # "METHOD path", in order

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, pattern: str, times: int = 1, status: int | None = 500) -> None:
        """Let the next `times` requests that match `pattern` fail with `status`, or drop their connection."""
        self.faults.append(Fault(pattern, times, status))

    def fault_for(self, request: str) -> Fault | None:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None

    def sha(self, repo_id: str) -> str:
        """A commit id that changes with the contents, as the client's cache expects."""
        contents = repr(sorted(self.files[repo_id].items()))
        return hashlib.sha1(contents.encode()).hexdigest()

    def uses_lfs(self, path: str, size: int) -> bool:
        return size > LFS_BYTES or path.endswith((".safetensors", ".bin", ".png"))


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_json(self, values: object, status: int = 200) -> None:
        self.reply(status, json.dumps(values).encode(), Content_Type="application/json")

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            return b"".join(self._chunks())
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def handle_request(self) -> None:
        self.path = unquote(self.path)
        fault = self.hub.fault_for(f"{self.command} {self.path}")
        if fault is not None and fault.status is None:
            self.rfile.read(min(100, int(self.headers.get("Content-Length", 0))))
            self.close_connection = True
            self.connection.close()
            return
        body = self.body()
        if fault is not None:
            self.reply_json({"error": "injected"}, fault.status)
            return
        route = urlsplit(self.path).path
        for method, pattern, action in ROUTES:
            match = re.fullmatch(pattern, route)
            if match and self.command in method:
                if self.is_refused(match.groupdict().get("repo", "")):
                    return
                action(self, body, **match.groupdict())
                return
        self.reply_json({"error": f"no route for {self.command} {route}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    @property
    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def is_refused(self, repo: str) -> bool:
        """Whether the request needs the token and does not have it; the reply is then sent."""
        writes = self.command in ("POST", "PUT") and not self.path.startswith("/lfs/")
        if self.authorized or not (writes or repo in self.hub.private or self.path == "/api/whoami-v2"):
            return False
        code = "RepoNotFound" if repo in self.hub.private and not writes else "Unauthorized"
        self.reply(401, b'{"error":"Invalid credentials"}', X_Error_Code=code)
        return True

    def whoami(self, body: bytes) -> None:
        self.reply_json({"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token"}})

    def validate_yaml(self, body: bytes) -> None:
        self.reply_json({"errors": [], "warnings": []})

    def create(self, body: bytes) -> None:
        request = json.loads(body)
        repo_id = f"{request.get('organization') or USER}/{request['name']}"
        exists = repo_id in self.hub.files
        self.hub.files.setdefault(repo_id, {})
        if (request.get("private") or request.get("visibility") == "private") and not exists:
            self.hub.private.add(repo_id)
        url = f"{self.hub.url}/{repo_id}"
        self.reply_json({"url": url, "id": repo_id, "name": repo_id}, 409 if exists else 200)

    def preupload(self, body: bytes, repo: str) -> None:
        if repo not in self.hub.files:
            return self.reply(404, b"", X_Error_Code="RepoNotFound")
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if self.hub.uses_lfs(file["path"], file["size"]) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self.reply_json({"files": files})

    def branch(self, body: bytes, repo: str, name: str) -> None:
        self.hub.branches.setdefault(repo, set()).add(name)
        self.reply_json({})

    def lfs_batch(self, body: bytes, repo: str) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.stored:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            objects.append(entry)
        self.reply_json({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.reply_json({"error": "the content does not have this hash"}, 400)
        self.hub.stored[oid] = body
        self.reply(200)

    def commit(self, body: bytes, repo: str) -> None:
        new: dict[str, bytes] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.commits.setdefault(repo, []).append(value["summary"])
            elif line["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    return self.reply_json({"error": f"{value['path']} was not uploaded"}, 400)
                new[value["path"]] = self.hub.stored[value["oid"]]
        self.hub.files[repo].update(new)
        sha = self.hub.sha(repo)
        self.reply_json({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})

    def info(self, body: bytes, repo: str) -> None:
        if repo not in self.hub.files:
            return self.reply(404, b"", X_Error_Code="RepoNotFound")
        siblings = [{"rfilename": path} for path in self.hub.files[repo]]
        self.reply_json({"id": repo, "sha": self.hub.sha(repo), "siblings": siblings, "tags": []})

    def tree(self, body: bytes, repo: str, folder: str | None = None) -> None:
        if repo not in self.hub.files:
            return self.reply(404, b"", X_Error_Code="RepoNotFound")
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in self.hub.files[repo].items()
            if not folder or path.startswith(f"{folder}/")
        ]
        if folder and not entries:
            return self.reply(404, b"", X_Error_Code="EntryNotFound")
        self.reply_json(entries)

    def download(self, body: bytes, repo: str, path: str) -> None:
        if repo not in self.hub.files:
            return self.reply(404, b"", X_Error_Code="RepoNotFound")
        sha = self.hub.sha(repo)
        if path not in self.hub.files[repo]:
            return self.reply(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        content = self.hub.files[repo][path]
        etag = hashlib.sha1(content).hexdigest()
        self.reply(200, content, ETag=f'"{etag}"', X_Repo_Commit=sha)


_KIND, _REPO = r"(?:models|kernels)", r"(?P<repo>[^/]+/[^/]+?)"
ROUTES = [
    (("GET",), r"/api/whoami-v2", _Handler.whoami),
    (("POST",), r"/api/validate-yaml", _Handler.validate_yaml),
    (("POST",), r"/api/repos/create", _Handler.create),
    (("POST",), rf"/api/{_KIND}/{_REPO}/preupload/[^/]+", _Handler.preupload),
    (("POST",), rf"/api/{_KIND}/{_REPO}/commit/[^/]+", _Handler.commit),
    (("POST",), rf"/api/{_KIND}/{_REPO}/branch/(?P<name>[^/]+)", _Handler.branch),
    (("GET",), rf"/api/{_KIND}/{_REPO}/tree/[^/]+(?:/(?P<folder>.*))?", _Handler.tree),
    (("GET",), rf"/api/{_KIND}/{_REPO}(?:/revision/[^/]+)?", _Handler.info),
    (("POST",), rf"/(?:kernels/)?{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("PUT",), r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_put),
    (("GET", "HEAD"), rf"/{_REPO}/resolve/[^/]+/(?P<path>.+)", _Handler.download),
]
