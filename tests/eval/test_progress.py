"""What an evaluation says of itself where there is no terminal."""

import io

from rich.console import Console

from eval.progress import EvaluationProgress


def said(total: int, done: int, seconds: list[float]) -> list[str]:
    """The lines of an evaluation whose turns end at `seconds` after its start."""
    out, times = io.StringIO(), iter([0.0, *seconds])
    with EvaluationProgress(total, done, Console(file=out), lambda: next(times)) as progress:
        for _ in seconds:
            progress.update(1.5)
    return out.getvalue().splitlines()


def test_a_line_now_and_then_and_one_at_the_end() -> None:
    assert said(4, 0, [5.0, 10.0, 18.0, 20.0]) == [
        "evaluate: 3/4 turns, 1.50 tokens a round (bonus included), 0:06 left",
        "evaluate: 4/4 turns, 1.50 tokens a round (bonus included)",
    ]


def test_turns_of_an_interrupted_evaluation_are_not_in_the_rate() -> None:
    lines = said(10, 4, [0.0, 0.0, 0.0, 0.0, 20.0])
    assert lines == ["evaluate: 5/10 turns, 1.50 tokens a round (bonus included), 1:40 left"]
