"""A hub on this machine that speaks as much of its protocol as huggingface_hub, transformers and datasets need to make
a repository, push a commit with small and large files, and read models and data sets of any commit."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_server import QuietHandler, serving

TOKEN = "hf_of_this_test"


@dataclass
class Repository:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by commit."""

    def remember(self) -> None:
        """Keep what branches have now as commits."""
        self.history |= {_commit_of(files): dict(files) for files in self.branches.values()}

    def at(self, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or a commit."""
        return self.branches.get(revision, self.history.get(revision))


class Hub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        """By id; those of data sets behind `datasets/`."""
        self.objects: dict[str, bytes] = {}
        """Large files by digest."""
        self.failures: list[tuple[str, int]] = []
        """The next request whose path has the text gets the status, once each."""
        self.requests: list[str] = []
        self.url = ""
        self.lock = threading.Lock()


def _commit_of(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + files[name])
    return digest.hexdigest()


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def _handle(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            for failure in self.hub.failures:
                if failure[0] in path:
                    self.hub.failures.remove(failure)
                    return self._answer(failure[1], {"error": "as the test wants it"})
            if self.command == "PUT" and path.startswith("/objects/"):
                assert hashlib.sha256(body).hexdigest() == path.removeprefix("/objects/")
                self.hub.objects[path.removeprefix("/objects/")] = body
                return self._answer(200, {})
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid username or password."})
            return self._answered(path, body)

    do_HEAD = do_GET = do_POST = do_PUT = _handle  # noqa: N815 - what the server calls

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answered(self, path: str, body: bytes) -> None:
        hub = self.hub
        if path == "/api/repos/create":
            given = json.loads(body)
            repo = f"{given['organization']}/{given['name']}"
            if repo in hub.repositories:
                return self._answer(409, {"error": "You already created this model repo", "url": f"{hub.url}/{repo}"})
            hub.repositories[repo] = Repository(given.get("visibility") == "private")
            return self._answer(200, {"url": f"{hub.url}/{repo}", "name": repo})
        words = path.strip("/").split("/")
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [self._object(one) for one in json.loads(body)["objects"]]
            return self._answer(200, {"transfer": "basic", "objects": objects})
        words = words[1:] if words[0] == "api" else words
        kind = f"{words[0]}/" if words[0] == "datasets" else ""
        words = words[1:] if words[0] in ("models", "datasets") else words
        repo, rest = kind + "/".join(words[:2]), words[2:]
        found = hub.repositories.get(repo)
        if found is None:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        found.remember()
        if not rest or rest[0] == "revision":
            files = found.at(rest[1] if rest else "main")
            if files is None:
                return self._answer(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name} for name in files]
            known = {
                "id": repo.removeprefix(kind),
                "private": found.private,
                "sha": _commit_of(files),
                "siblings": siblings,
            }
            return self._answer(200, known)
        if rest[0] == "branch":
            if rest[1] in found.branches:
                return self._answer(409, {"error": "Reference already exists"})
            found.branches[rest[1]] = dict(found.branches["main"])
            return self._answer(200, {})
        if rest[0] == "preupload":
            files = found.branches[rest[1]]
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": self._oid(one["path"], files),
                }
                for one in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": modes})
        if rest[0] == "commit":
            files = found.branches[rest[1]]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    found.messages.append(value["summary"])
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                else:
                    assert line["key"] == "lfsFile"
                    files[value["path"]] = hub.objects[value["oid"]]
            oid = _commit_of(files)
            url = f"{hub.url}/{repo}/commit/{oid}"
            return self._answer(200, {"commitUrl": url, "commitOid": oid, "pullRequestUrl": None})
        assert rest[0] in ("resolve", "tree", "paths-info"), path
        known_files = found.at(rest[1])
        if known_files is None:
            return self._answer(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
        files = known_files
        if rest[0] == "paths-info":
            wanted = parse_qs(body.decode())["paths"]
            return self._answer(
                200, [one for name in wanted for one in self._listed(files, name) if one["path"] == name]
            )
        if rest[0] == "tree":
            inside = "/".join(rest[2:])
            listed = self._listed(files, inside)
            if not listed:
                return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return self._answer(200, listed)
        content = files.get("/".join(rest[2:]))
        if content is None:
            return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": _commit_of(files), "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        return self._send(200, content, headers)

    def _object(self, one: dict[str, Any]) -> dict[str, Any]:
        known = {"oid": one["oid"], "size": one["size"]}
        if one["oid"] in self.hub.objects:
            return known
        return known | {"actions": {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}"}}}

    def _listed(self, files: dict[str, bytes], inside: str) -> list[dict[str, Any]]:
        """Files and folders at a path or below it."""
        folders = {str(one) for name in files for one in PurePosixPath(name).parents if str(one) != "."}
        found: list[dict[str, Any]] = [
            {"type": "file", "path": name, "size": len(files[name]), "oid": self._oid(name, files)} for name in files
        ]
        found += [
            {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest()} for name in folders
        ]
        below = f"{inside}/" if inside else ""
        return sorted(
            (one for one in found if one["path"] == inside or one["path"].startswith(below)),
            key=lambda one: one["path"],
        )

    def _oid(self, name: str, files: dict[str, bytes]) -> str | None:
        content = files.get(name)
        if content is None:
            return None
        if name.endswith(".safetensors"):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def files_of(folder: Path) -> dict[str, bytes]:
    """What a repository holds that was made of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def local_hub() -> Iterator[Hub]:
    """A hub that answers on the loopback device."""
    hub = Hub()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub


def environment(hub: Hub, token: str = TOKEN) -> dict[str, str]:
    """For processes whose hub it is. Large files travel by the older protocol, which it speaks."""
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
