"""An answer on the screen as it comes, accepted draft tokens marked: in green, without colour in ⟦ ⟧."""

import sys
from itertools import groupby

from rich.console import Console

from .stream import StopChecker

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
# What a model writes must not steer the terminal: control characters but tab, newline and carriage return.
CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd")


class Printer:
    """Prints what `checker` has settled, never past a stop string; each character is marked as the token that
    completed it was.
    """

    def __init__(self, checker: StopChecker) -> None:
        console = Console()  # knows about terminals, NO_COLOR and FORCE_COLOR
        coloured = console.color_system is not None and not console.no_color
        self.before, self.after = (GREEN, PLAIN) if coloured else ("⟦", "⟧")
        self.legend = "in green" if coloured else "in ⟦ ⟧"
        self._checker = checker
        self._marks: list[bool] = []  # of the characters so far: whether from an accepted draft token
        self._shown = 0
        self._open = False

    def push(self, token: int, accepted: bool) -> None:
        """Print what the next token settles."""
        self._checker.push(token)
        self._marks += [accepted] * (len(self._checker.whole) - len(self._marks))
        self._print(self._checker.settled)

    def close(self) -> None:
        """Print what was held back, and end the line if there is one."""
        self._print(self._checker.text)
        self._switch(False)
        sys.stdout.write("\n" if self._shown else "")
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        fresh = range(self._shown, len(text))
        for accepted, run in groupby(fresh, lambda i: i < len(self._marks) and self._marks[i]):
            self._switch(accepted)
            sys.stdout.write("".join(text[i] for i in run).translate(CONTROLS))
        self._shown = len(text)
        sys.stdout.flush()

    def _switch(self, accepted: bool) -> None:
        if accepted != self._open:
            sys.stdout.write(self.before if accepted else self.after)
            self._open = accepted
