"""An OpenAI-compatible server on loopback, as far as collection asks one: our plain decoder behind three paths.

It answers in token ids like vLLM and can be made to misbehave.
"""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from inference.decode import Decoder, Request
from inference.sampling import Sampling
from inference.target import Target

Body = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """An answer other than the right one; drop: the connection is cut instead."""

    status: int = 500
    content: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False


class ModelServer(ThreadingHTTPServer):
    """`with ModelServer(target) as server:` serves at server.url; `asked` has the bodies of completions, `most` how
    many were answered at a time. misbehave: what to say to one instead, None for the right answer."""

    daemon_threads = True

    def __init__(self, target: Target, *, port: int = 0, key: str | None = None, context: int = 4096) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.target, self.key, self.context = target, key, context
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.name, self.ids, self.logprobs = "made-up", True, True
        self.splits: list[int] | None = None  # of any text; None: as the target's tokenizer does
        self.misbehave: Callable[[Body], Said | None] = lambda body: None
        self.asked: list[Body] = []
        self.now = self.most = 0
        self.lock, self.dead = threading.Lock(), False
        self.connections: list[socket.socket] = []

    def __enter__(self) -> "ModelServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """At once: no request in flight is answered."""
        if not self.dead:
            self.dead = True
            self.shutdown()
            self.server_close()
            for connection in self.connections:
                with suppress(OSError):  # it ended before
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own."""
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *_: Any) -> None:
        """Of connections that the client cut: silence."""

    def complete(self, body: Body) -> Body:
        """The target's answer."""
        request = Request(
            body["prompt"], max_new_tokens=body["max_tokens"], stop=tuple(body["stop"]),
            sampling=Sampling(temperature=body["temperature"], top_p=body["top_p"]),
        )  # fmt: skip
        with self.lock:
            result = next(Decoder(self.target, None, seed=body.get("seed", 0)).run([request]))
            told = prompt_logprobs(self.target, body["prompt"]) if "prompt_logprobs" in body and self.logprobs else None
        choice = {"index": 0, "text": result.text, "prompt_logprobs": told}
        choice["finish_reason"] = "length" if result.finish_reason == "length" else "stop"
        if self.ids and body["return_token_ids"]:
            choice |= {"token_ids": result.tokens, "prompt_token_ids": body["prompt"]}
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: ModelServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        """The list of models."""
        self.guarded({})

    def do_POST(self) -> None:
        """Everything else."""
        self.guarded(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def guarded(self, body: Body) -> None:
        """With the key, if one is wanted."""
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self.say(Said(401, {"error": "Unauthorized"}))
        said = self.answer(body)
        return self.cut() if said.drop else self.say(said)

    def answer(self, body: Body) -> Said:
        """By path."""
        match self.path:
            case "/v1/models":
                card = {"id": self.server.name, "max_model_len": self.server.context, "parent": None}
                return Said(200, {"object": "list", "data": [card]})
            case "/tokenize":
                splits = self.server.splits or self.server.target.text.encode(body["prompt"])
                return Said(200, {"tokens": splits})
            case "/v1/completions" if body["model"] == self.server.name:
                return self.completion(body)
        return Said(404, {"error": {"message": f"no {body.get('model', self.path)} here"}})

    def completion(self, body: Body) -> Said:
        """Counted."""
        with self.server.lock:
            self.server.asked.append(body)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        try:
            return self.server.misbehave(body) or Said(200, self.server.complete(body))
        finally:
            with self.server.lock:
                self.server.now -= 1

    def say(self, said: Said) -> None:
        """JSON, or text as it is."""
        content = said.content.encode() if isinstance(said.content, str) else json.dumps(said.content).encode()
        self.send_response(said.status)
        for name, value in {"Content-Length": str(len(content)), **said.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def cut(self) -> None:
        """As when the line breaks."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def prompt_logprobs(target: Target, prompt: list[int]) -> list[Any]:
    """As vLLM tells them."""
    last = target.read(torch.tensor([prompt]), torch.tensor([len(prompt)])).last
    scores = target.head(last)[0].float().log_softmax(-1)
    told = [{str(token): {"logprob": scores[at, token].item()}} for at, token in enumerate(prompt[1:])]
    return [None, *told]
