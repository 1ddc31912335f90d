"""The code changed for a while: how faults are planted, and every draw of the loop replaced by a choice."""

from types import TracebackType
from typing import Any, Protocol


class Patch(Protocol):
    """What changes the code for a while: `Changes`, or pytest's monkeypatch."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute."""


class Changes:
    """Attributes replaced inside a `with`, and put back at its end."""

    def __init__(self) -> None:
        self.before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Changes":
        return self

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self.before.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self.before:
            setattr(*self.before.pop())
