"""One OpenAI-compatible server over HTTP, and whether it is in service. Knows nothing about rows."""

import os
import random
from typing import Any

import httpx2

from conf.errors import UserError

KEY = "DRAFTSMITH_API_KEY"  # the only place an API key is taken from
BREAK_AFTER = 3  # troubles in a row, after which a server is left alone
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0  # shorter than servers keep an idle connection, or a request meets its end
BUSY = (429, 503)
ROWS_FAULT = (400, 413, 422)


class Trouble(Exception):
    """What may pass. sent: the request may have been the cause; lost: nobody is there; after: seconds, where told."""

    def __init__(self, reason: str, *, sent: bool = True, lost: bool = False, after: float | None = None) -> None:
        super().__init__(reason)
        self.sent, self.lost, self.after = sent, lost, after


class Refusal(Exception):
    """A request that the server understands and will not answer, however often it is asked."""


class Endpoint:
    """A server at `url` that gets `slots` requests at a time. It begins out of service; `restore` puts it in.

    In service, it rests until `resumes` when it said so; out of service, that is when it is looked at again (circuit
    breaker). Times are those of the event loop.
    """

    def __init__(self, url: str, slots: int, timeout: float, key: str | None = None) -> None:
        """timeout: seconds for one answer; key: sent as a bearer token, never told."""
        self.url, self.slots, self.busy = url, slots, 0
        self.model = ""
        self.in_service = False
        self.resumes = 0.0
        self.last_trouble = ""
        self._key, self._troubles = key, 0
        self._client = httpx2.AsyncClient(
            base_url=url, timeout=httpx2.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx2.Limits(max_connections=slots + 1, keepalive_expiry=IDLE_SECONDS),
            trust_env=not _is_loopback(url),
        )  # fmt: skip

    async def close(self) -> None:
        """Give the connections back."""
        await self._client.aclose()

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """JSON of a GET, or of a POST of `body`. Raises Trouble, Refusal; UserError: the key."""
        try:
            answer = await self._client.request("GET" if body is None else "POST", path, json=body)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Trouble(f"no connection ({_line(error)})", sent=False, lost=True) from error
        except httpx2.TimeoutException as error:
            raise Trouble(f"no answer in time ({type(error).__name__})") from error
        except httpx2.RequestError as error:
            raise Trouble(f"connection lost ({_line(error)})", lost=True) from error
        if answer.status_code == 200:
            return _json(answer)
        raise self._error(answer)

    def _error(self, answer: httpx2.Response) -> Exception:
        code = answer.status_code
        if code in (401, 403):
            what = f"refuses the key in {KEY}" if self._key else "wants a key"
            return UserError(f"{self.url} {what} (HTTP {code}): set {KEY} to one that it takes")
        said = _message(answer)
        if self._key:
            said = said.replace(self._key, "***")
        reason = f"HTTP {code}: {said}" if said else f"HTTP {code}"
        if code in ROWS_FAULT:
            return Refusal(reason)
        return Trouble(reason, sent=code not in BUSY, after=_retry_after(answer))

    def available(self, now: float) -> bool:
        """Whether it takes one more request."""
        return self.in_service and now >= self.resumes and self.busy < self.slots

    def restore(self) -> None:
        """In service, all troubles forgotten."""
        self.in_service, self.resumes = True, 0.0
        self.answered()

    def answered(self) -> None:
        """Its troubles in a row end here."""
        self._troubles = 0

    def note(self, trouble: Trouble, now: float) -> bool:
        """Count a trouble; whether it took the server out of service. It rests for a time that doubles each time."""
        self._troubles, self.last_trouble = self._troubles + 1, str(trouble)
        was = self.in_service
        if trouble.lost or self._troubles >= BREAK_AFTER:
            self.in_service = False
        if not self.in_service or not trouble.sent:
            self.resumes = max(self.resumes, now + (trouble.after or backoff(self._troubles)))
        return was and not self.in_service


def backoff(times: int) -> float:
    """Seconds to wait after so many failures: doubling up to a limit, half to one and a half of it, so that what failed
    together does not come back together."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(times - 1, 16)) * random.uniform(0.5, 1.5)


def api_key() -> str | None:
    """The key of the environment, None without one."""
    return os.environ.get(KEY) or None


def _is_loopback(url: str) -> bool:
    """Such a server is not behind the proxy that the environment names."""
    return httpx2.URL(url).host in ("localhost", "127.0.0.1", "::1")


def _json(answer: httpx2.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise Trouble("its answer is not JSON") from error


def _message(answer: httpx2.Response) -> str:
    """What an error says, in one line of at most 200 characters: vLLM has it in error.message, SGLang in message."""
    try:
        body = answer.json()
    except ValueError:
        body = answer.text
    if isinstance(body, dict):
        error = body.get("error", body)
        body = error.get("message", "") if isinstance(error, dict) else error
    return " ".join(str(body).split())[:200]


def _retry_after(answer: httpx2.Response) -> float | None:
    """Seconds of a Retry-After header; a date in it is left to the own waiting times."""
    value = answer.headers.get("Retry-After", "")
    return min(float(value), 10 * LONGEST_WAIT) if value.isdecimal() else None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
