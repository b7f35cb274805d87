"""A stand-in of the Hugging Face hub: an HTTP server with the part of its API that huggingface_hub uses for models.

It keeps repositories in memory: who may read them, and the files of their last commit. Files of more than 1 KiB are
uploaded by Git LFS, as the hub's client does without hf_xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN, OWNER = "hf_abcdefghijklmnopqrstuvwxyz", "ada-lovelace"
LARGE = 1024


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b""})
    commits: int = 1

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(self.commits).encode()).hexdigest()


@dataclass
class Hub:
    """The server's state; ``requests`` are method and path of each request."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def answer(self, content: Any = None, status: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def has_token(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def route(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            if self.headers.get("Authorization") and not self.has_token():
                self.body()
                self.answer({"error": "Invalid"}, 401, X_Error_Message="Invalid credentials in Authorization header")
            elif path == "/":
                self.answer(b"")
            elif path == "/api/whoami-v2":
                self.answer({"name": OWNER, "type": "user", "orgs": []} if self.has_token() else {}, 200)
            elif path == "/api/repos/create":
                self.create(json.loads(self.body()))
            elif path == "/api/validate-yaml":
                self.body()
                self.answer({"errors": [], "warnings": []})
            elif path.startswith("/lfs/"):
                hub.objects[path.removeprefix("/lfs/")] = self.body()
                self.answer({})
            else:
                self.of_repository(path)

        def create(self, wanted: dict[str, Any]) -> None:
            name = f"{wanted['organization'] or OWNER}/{wanted['name']}"
            if not name.startswith(f"{OWNER}/"):
                self.answer({"error": "no rights"}, 403)
            elif name in hub.repositories:
                self.answer({"error": "exists", "url": f"{hub.endpoint}/{name}"}, 409)
            else:
                private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
                hub.repositories[name] = Repository(private=private)
                self.answer({"url": f"{hub.endpoint}/{name}", "id": name, "name": name})

        def of_repository(self, path: str) -> None:
            parts = path.removeprefix("/api/models/").lstrip("/").split("/")
            name, rest = "/".join(parts[:2]).removesuffix(".git"), parts[2:]
            found = hub.repositories.get(name)
            if found is None or (found.private and not self.has_token()):
                self.body()
                self.answer({}, 404 if self.has_token() else 401, X_Error_Code="RepoNotFound")
            elif rest[:1] == ["resolve"]:
                self.resolve(found, "/".join(rest[2:]))
            elif rest[:1] == ["tree"]:
                self.answer(
                    [
                        {"type": "file", "path": key, "size": len(content), "oid": "0" * 40}
                        for key, content in found.files.items()
                    ]
                )
            elif rest[:1] == ["preupload"]:
                files = json.loads(self.body())["files"]
                modes = {file["path"]: "lfs" if file["size"] > LARGE else "regular" for file in files}
                self.answer({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})
            elif rest[-2:] == ["objects", "batch"]:
                href = f"{hub.endpoint}/lfs/"
                objects = json.loads(self.body())["objects"]
                answer = [{**one, "actions": {"upload": {"href": href + one["oid"]}}} for one in objects]
                self.answer({"transfer": "basic", "objects": answer})
            elif rest[:1] == ["commit"]:
                self.commit(name, found)
            else:
                siblings = [{"rfilename": key} for key in found.files]
                self.answer({"id": name, "private": found.private, "sha": found.sha, "siblings": siblings})

        def commit(self, name: str, repository: Repository) -> None:
            for line in self.body().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    repository.files[value["path"]] = hub.objects[value["oid"]]
                elif entry["key"] == "deletedFile":
                    del repository.files[value["path"]]
            repository.commits += 1
            url = f"{hub.endpoint}/{name}/commit/{repository.sha}"
            self.answer({"commitUrl": url, "commitOid": repository.sha, "success": True})

        def resolve(self, repository: Repository, path: str) -> None:
            if path not in repository.files:
                self.answer({}, 404, X_Error_Code="EntryNotFound")
                return
            content = repository.files[path]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.answer(content, 200, ETag=etag, X_Repo_Commit=repository.sha)

        do_GET = do_HEAD = do_POST = do_PUT = route

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Hub]:
    """A running stand-in, which this process and those that it starts use in place of the hub, with a valid token."""
    from huggingface_hub import constants

    from comingle.models.loading import is_hub_reachable

    state = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(state)) as server:
        state.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        # The client reads these variables when it is imported; the constants are for this process.
        cache = str(tmp_path / "hub-cache")
        for name, value in {"HF_ENDPOINT": state.endpoint, "HF_HUB_CACHE": cache, "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        files = state.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        values = {"ENDPOINT": state.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_CACHE": cache}
        for name, value in {**values, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        is_hub_reachable.cache_clear()
        yield state
        is_hub_reachable.cache_clear()
        server.shutdown()
        thread.join()
