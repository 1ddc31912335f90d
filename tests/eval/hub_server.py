"""A model hub on loopback, as far as a push and a download go: repositories, commits, large files, tags, pull requests.

What it answers is what huggingface_hub asks for. `cut` breaks the connection at the next large file. Data sets are the
repositories whose name begins with `datasets/`.
"""

import base64
import hashlib
import json
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "t" * 30  # made up
LARGE = (".safetensors", ".parquet")


@dataclass
class Repo:
    """files by commit, in order; tags; pull requests by number."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """The newest commit of main."""
        return [commit for commit in self.commits if commit not in self.pulls.values()][-1]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]]:
        """(commit, files) of a commit, a tag, refs/pr/N or a branch."""
        commit = self.pulls.get(revision) or self.tags.get(revision) or revision
        commit = commit if commit in self.commits else self.head
        return commit, self.commits[commit]


class Hub(ThreadingHTTPServer):
    """`with Hub() as hub:` serves at hub.endpoint."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.cut = False
        self.sent = 0  # bytes of large files that arrived

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """One request; the path's parts say which."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def handle_one(self) -> None:
        """Read the body whatever happens, then answer."""
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and parts[0] != "large":
            return self.answer({"error": "Invalid credentials"}, 401)
        if parts[:2] == ["api", "repos"]:
            return self.create()
        if parts[0] == "large":
            return self.take(parts[1])
        if parts[:2] == ["api", "validate-yaml"]:
            return self.answer({"errors": [], "warnings": []})
        api = parts[0] == "api"
        parts = parts[1:] if api else parts  # [models | datasets] owner name ...; without "models" where files lie
        kind = ["datasets"] if parts[0] == "datasets" else []
        parts = parts[1:] if api or kind else parts
        name = "/".join([*kind, parts[0], parts[1].removesuffix(".git")])
        repo = self.server.repos.get(name)
        if repo is None:
            return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return self.repository(repo, name, parts[2:])

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_one

    def repository(self, repo: Repo, name: str, rest: list[str]) -> None:
        """Everything below one repository."""
        revision = "/".join(rest[1:])
        match rest[0] if rest else "revision":
            case "revision":
                commit, files = repo.at(revision)
                siblings = [{"rfilename": path} for path in files]
                self.answer({"id": name, "sha": commit, "private": repo.private, "siblings": siblings})
            case "tree":
                files = repo.at(revision)[1]
                self.answer([{"type": "file", "path": p, "size": len(b), "oid": sha1(b)} for p, b in files.items()])
            case "preupload":
                self.answer({"files": [self.mode(repo, entry) for entry in json.loads(self.body)["files"]]})
            case "info":
                objects = [self.large(entry) for entry in json.loads(self.body)["objects"]]
                self.answer({"transfer": "basic", "objects": objects})
            case "commit":
                self.commit(repo, name)
            case "refs":
                tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": c} for n, c in repo.tags.items()]
                self.answer({"branches": [], "converts": [], "tags": tags})
            case "tag":
                self.tag(repo, revision)
            case _:
                self.file(repo, rest)

    def create(self) -> None:
        """A new repository, or 409."""
        asked = json.loads(self.body)
        kind = "datasets/" if asked.get("type") == "dataset" else ""
        name = f"{kind}{asked['organization']}/{asked['name']}"
        address = {"url": f"{self.server.endpoint}/{name}"}
        if name in self.server.repos:
            return self.answer(address | {"error": "You already created this model repo"}, 409)
        self.server.repos[name] = Repo(asked.get("visibility") == "private")
        return self.answer(address)

    def mode(self, repo: Repo, entry: dict[str, Any]) -> dict[str, Any]:
        """How a file is to be sent, and what is there already."""
        path, large = entry["path"], entry["path"].endswith(LARGE)
        there = repo.commits[repo.head].get(path)
        oid = None if there is None else hashlib.sha256(there).hexdigest() if large else sha1(there)
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def large(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Where a large file goes; nowhere when it is here."""
        href = f"{self.server.endpoint}/large/{entry['oid']}"
        return entry if entry["oid"] in self.server.large else entry | {"actions": {"upload": {"href": href}}}

    def take(self, oid: str) -> None:
        """A large file arrives, or the line is cut."""
        if self.server.cut:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.large[oid] = self.body
        self.server.sent += len(self.body)
        return self.answer({})

    def commit(self, repo: Repo, name: str) -> None:
        """Files onto main or a pull request."""
        files = dict(repo.commits[repo.head])
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = hashlib.sha1(self.body + str(len(repo.commits)).encode()).hexdigest()
        pull = None
        if "create_pr" in self.path:
            number = len(repo.pulls) + 1
            repo.pulls[f"refs/pr/{number}"] = commit
            pull = f"{self.server.endpoint}/{name}/discussions/{number}"
        repo.commits[commit] = files
        url = f"{self.server.endpoint}/{name}/commit/{commit}"
        self.answer({"commitUrl": url, "commitOid": commit, "pullRequestUrl": pull})

    def tag(self, repo: Repo, revision: str) -> None:
        """Make or delete one."""
        if self.command == "DELETE":
            del repo.tags[revision]
        else:
            repo.tags[json.loads(self.body)["tag"]] = revision
        self.answer({})

    def file(self, repo: Repo, rest: list[str]) -> None:
        """Download: resolve/REVISION/PATH."""
        known = next(n for n in range(len(rest) - 1, 1, -1) if "/".join(rest[n:]) in repo.at("/".join(rest[1:n]))[1])
        commit, files = repo.at("/".join(rest[1:known]))
        content = files["/".join(rest[known:])]
        self.answer(content, 200, {"ETag": f'"{sha1(content)}"', "X-Repo-Commit": commit})

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """JSON, or bytes as they are."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def sha1(content: bytes) -> str:
    """Git's id of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
