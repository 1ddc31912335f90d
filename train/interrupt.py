"""Ctrl-C and SIGTERM while training: the step in progress is finished and saved first."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """`requested` once a signal came; a second Ctrl-C interrupts at once. A context manager.

    quiet: one rank of several, which all stop together: whoever launched them speaks.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.requested, self.quiet = False, quiet
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._old = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        if not self.quiet:
            print("stopping: the step in progress is finished and saved", flush=True)
