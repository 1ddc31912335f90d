"""Any number of servers as one decoder: requests go to whoever is free, in one thread and one event loop.

A request whose try failed waits and is tried again; a server that fails is left alone, looked at again at growing
intervals, and checked anew before it gets a request.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from conf.errors import UserError
from conf.schema import DataConfig
from conf.units import parse_seconds
from inference.decode import Request, Result

from .completions import PATH, as_result, completion, read_answer
from .endpoint import Endpoint, Refusal, Trouble, api_key, backoff
from .failed import Failed, FailedRows, ServersGone
from .probe import Likeness, Probe

POLL = 0.1  # seconds: how long it may go unnoticed that a wait is over


@dataclass
class _Job:
    """A request on its way: tries so far that it may have been the cause of, and when the next one may begin."""

    request: Request
    attempts: int = 0
    resumes: float = 0.0


@dataclass(frozen=True)
class Stream:
    """A decoder of the servers, with draws of its own: see data/collect.py."""

    servers: "Servers"
    name: str

    def run(self, requests: Iterable[Request]) -> Iterator[Result | Failed]:
        """Results and failures as they come. Raises ServersGone."""
        return self.servers.run(requests, self.name)


class Servers:
    """The servers of data.endpoints: a context manager, in which they have been checked."""

    def __init__(self, cfg: DataConfig, probe: Probe, seed: int, failed: FailedRows) -> None:
        """seed: of all draws. failed: takes the rows that fail."""
        self.cfg, self.probe, self.seed, self.failed = cfg, probe, seed, failed
        self.patience = parse_seconds(cfg.patience, "data.patience")
        self._runner = asyncio.Runner()
        self._endpoints: list[Endpoint] = []
        self._tasks: dict[asyncio.Task[Result | Failed | None], Endpoint] = {}
        self._checks: dict[asyncio.Task[None], Endpoint] = {}
        self._waiting: deque[_Job] = deque()
        self._last_answer = 0.0

    def __enter__(self) -> Self:
        """UserError: a server that has not the target, or none that answers."""
        try:
            self._runner.run(self._connect())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def stream(self, name: str) -> Stream:
        """A row of the store is drawn the same whenever it is asked for; what else there is, by its stream's name."""
        return Stream(self, "" if name.startswith("responses") else name)

    def run(self, requests: Iterable[Request], stream: str) -> Iterator[Result | Failed]:
        """See Stream.run."""
        queue = iter(requests)
        self._last_answer = time.monotonic()
        try:
            while True:
                self._runner.run(self._send(queue, stream))
                if not self._tasks and not self._waiting:
                    return
                yield from self._runner.run(self._receive())
        finally:
            for task, endpoint in self._tasks.items():
                task.cancel()
                endpoint.busy -= 1
            self._tasks.clear()
            self._waiting.clear()

    # -- servers ----------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        key = api_key()
        self._endpoints = [Endpoint(url, self.cfg.batch, self.patience, key) for url in self.cfg.endpoints]
        looks = await asyncio.gather(*map(self._first_look, self._endpoints))
        if not any(endpoint.in_service for endpoint in self._endpoints):
            raise UserError(f"no server answers: {self._troubles()}; start one, or name another in data.endpoints")
        for endpoint, likeness in zip(self._endpoints, looks, strict=True):
            said = f"{endpoint.model}, {likeness}" if likeness else f"{endpoint.last_trouble}; it is looked at again"
            print(f"{endpoint.url}: {said}", flush=True)

    async def _first_look(self, endpoint: Endpoint) -> Likeness | None:
        try:
            return await self.probe.look(endpoint)
        except Trouble as trouble:
            endpoint.note(trouble, time.monotonic())
            return None

    async def _look_again(self, endpoint: Endpoint) -> None:
        try:
            likeness = await self.probe.look(endpoint)
            print(f"{endpoint.url} is back: {endpoint.model}, {likeness}", flush=True)
        except Trouble as trouble:
            endpoint.note(trouble, time.monotonic())
        except UserError as error:
            self._drop(endpoint, error)

    def _drop(self, endpoint: Endpoint, error: UserError) -> None:
        """A server that must not be asked any more. Raises ServersGone when it was the last."""
        if endpoint not in self._endpoints:
            return
        self._endpoints.remove(endpoint)
        endpoint.in_service = False
        if not self._endpoints:
            raise ServersGone(str(error)) from error
        print(f"{error}; the other servers go on", flush=True)

    def _troubles(self) -> str:
        return ", ".join(f"{endpoint.url} ({endpoint.last_trouble})" for endpoint in self._endpoints)

    # -- requests ---------------------------------------------------------------------------------------------

    async def _send(self, queue: Iterator[Request], stream: str) -> None:
        """Give every free place a request, and look at servers whose time has come."""
        now = time.monotonic()
        for endpoint in self._endpoints:
            if not endpoint.in_service and now >= endpoint.resumes and endpoint not in self._checks.values():
                self._checks[asyncio.create_task(self._look_again(endpoint))] = endpoint
        while ready := [endpoint for endpoint in self._endpoints if endpoint.available(now)]:
            job = self._next(queue, now)
            if job is None:
                return
            endpoint = max(ready, key=lambda one: one.slots - one.busy)
            endpoint.busy += 1
            self._tasks[asyncio.create_task(self._ask(endpoint, job, stream))] = endpoint

    def _next(self, queue: Iterator[Request], now: float) -> _Job | None:
        for _ in range(len(self._waiting)):
            if self._waiting[0].resumes <= now:
                return self._waiting.popleft()
            self._waiting.rotate(-1)
        request = next(queue, None)
        return None if request is None else _Job(request)

    async def _receive(self) -> list[Result | Failed]:
        """Wait until something happens. Raises ServersGone when nothing has for data.patience."""
        tasks: set[asyncio.Task[Any]] = {*self._tasks, *self._checks}
        if tasks:
            await asyncio.wait(tasks, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(POLL)
        for check in [check for check in self._checks if check.done()]:
            del self._checks[check]
            check.result()
        done = [task for task in self._tasks if task.done()]
        for task in done:
            self._tasks.pop(task).busy -= 1
        results = [result for task in done if (result := task.result()) is not None]
        if results:
            self._last_answer = time.monotonic()
        elif time.monotonic() - self._last_answer > self.patience:
            raise ServersGone(f"no server has answered for {self.cfg.patience} (data.patience): {self._troubles()}")
        return results

    async def _ask(self, endpoint: Endpoint, job: _Job, stream: str) -> Result | Failed | None:
        """One try. None: there will be another."""
        request, probe = job.request, self.probe
        body = completion(endpoint.model, request, probe.target.text, self._seed_of(request, stream))
        try:
            answer = read_answer(await endpoint.ask(PATH, body), request, probe.target.vocab_size)
            result = as_result(answer, request, probe.target.text)
        except Refusal as error:
            job.attempts += 1
            return self._fail(job, f"{endpoint.url}: {error}", stream)
        except Trouble as trouble:
            return self._again(job, endpoint, trouble, stream)
        except UserError as error:
            self._waiting.append(job)
            self._drop(endpoint, error)
            return None
        endpoint.answered()
        return result

    def _again(self, job: _Job, endpoint: Endpoint, trouble: Trouble, stream: str) -> Failed | None:
        now = time.monotonic()
        if endpoint.note(trouble, now):
            print(f"{endpoint.url} is out of service ({trouble}); it is looked at again", flush=True)
        if trouble.sent:
            job.attempts += 1
            job.resumes = now + backoff(job.attempts)
        if job.attempts >= self.cfg.attempts:
            return self._fail(job, f"{endpoint.url}: {trouble}", stream)
        self._waiting.append(job)
        return None

    def _fail(self, job: _Job, reason: str, stream: str) -> Failed:
        failed = Failed(job.request, reason, job.attempts)
        if not stream:
            self.failed.add(failed)
        return failed

    def _seed_of(self, request: Request, stream: str) -> int:
        """Of a request's own draws: 31 bits, which every server takes."""
        return int(hashlib.sha256(f"{self.seed} {stream} {request.key}".encode()).hexdigest()[:8], 16) >> 1

    def _end(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        for task in (*self._tasks, *self._checks):
            task.cancel()
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))
