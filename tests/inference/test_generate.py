"""inference/__main__.py and show.py: what `make generate` puts on the screen, with and without colour."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import inference.__main__ as verb
from conf.cli import guarded
from conf.errors import UserError
from conf.schema import GenerateConfig, HydraConfig, NgramConfig, SuffixConfig, TargetConfig
from inference.acceptance import Round
from inference.artifact import save_drafter
from inference.decode import Decoder, Request
from inference.drafters import build
from inference.load import load_target
from inference.show import CONTROLS
from inference.text import Text
from inference.tiny import make_tiny_tokenizer

TEXT = Text(make_tiny_tokenizer(), "tiny", eos_ids=[2])


class Loop:
    """Stands for a decoder: these rounds, then the error if there is one."""

    def __init__(self, rounds: Sequence[tuple[str | list[int], int]], error: BaseException | None = None) -> None:
        self.rounds, self.error = rounds, error

    def stream(self, request: Request) -> Iterator[Round]:
        for said, accepted in self.rounds:
            ids = said if isinstance(said, list) else [i for char in said for i in TEXT.encode(char)]
            yield Round(ids[:accepted], accepted, ids)
        if self.error is not None:
            raise self.error


def _shown(loop: Loop, *stop: str) -> None:
    verb.show(SimpleNamespace(text=TEXT), loop, Request([1], stop=stop))  # type: ignore[arg-type]


@pytest.fixture
def colour(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal with colours."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return monkeypatch


SAID = [("T", 0), ("he a", 3), ("n", 0), ("vil", 2)]


def test_accepted_tokens_are_in_brackets_where_there_is_no_colour(
    capsys: pytest.CaptureFixture[str], colour: pytest.MonkeyPatch
) -> None:
    plain = "T⟦he ⟧an⟦vi⟧l\n\naccepted draft tokens in ⟦ ⟧\n"
    colour.setenv("NO_COLOR", "1")
    _shown(Loop(SAID))
    assert capsys.readouterr().out == plain
    colour.delenv("FORCE_COLOR")  # and a pipe has none
    colour.delenv("NO_COLOR")
    _shown(Loop(SAID))
    assert capsys.readouterr().out == plain


@pytest.mark.usefixtures("colour")
def test_accepted_tokens_are_green_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _shown(Loop(SAID))
    green, end = "\x1b[32m", "\x1b[0m"
    assert capsys.readouterr().out == f"T{green}he {end}an{green}vi{end}l\n\naccepted draft tokens in green\n"


@pytest.mark.parametrize("stop, shown", [
    (("END",), "one "), (("E",), "one "), (("nothing", "END t"), "one "), (("ENDX", "two"), "one END "),
    (("one END two three",), "one END two"), (("o!",), "one END two"),
])  # fmt: skip
def test_nothing_from_a_stop_string_on_is_shown(
    stop: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [(part, 0) for part in ("one", " EN", "D", " tw", "o")]
    _shown(Loop(rounds), *stop)
    assert capsys.readouterr().out.splitlines()[0] == shown


def test_what_may_become_a_stop_string_is_held_back_until_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    class Watched(Loop):
        def stream(self, request: Request) -> Iterator[Round]:
            for r in super().stream(request):
                yield r
                seen.append(capsys.readouterr().out)

    _shown(Watched([("ab", 0), ("EN", 1), ("Dx", 1), ("EN", 0)]), "ENDE")
    assert seen == ["ab", "", "⟦E⟧N⟦D⟧x", ""]
    assert capsys.readouterr().out.startswith("EN\n")


def test_characters_split_over_tokens_and_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    moon = TEXT.encode("月")
    assert len(moon) == 3
    _shown(Loop([(moon[:1], 0), (moon[1:], 2), ("\tx\x1b[2J\r\n\x07", 0), (moon[:2], 1)]))
    assert capsys.readouterr().out.startswith("⟦月⟧\tx\ufffd[2J\r\n\ufffd\ufffd\n")


def test_an_interruption_ends_the_line_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_text_folder: Path, tmp_path: Path
) -> None:
    loop = Loop([("a", 0), ("bcd", 3)], KeyboardInterrupt())
    monkeypatch.setattr(verb, "decoder", lambda *_: loop)
    assert guarded(lambda: verb.run(_config(tiny_text_folder, tmp_path, prompt="Hi"))) == 130
    out, err = capsys.readouterr()
    assert out == "a⟦bcd⟧\n" and err == "stopped: the answer was interrupted; its figures were not taken\n"


# The whole verb


def _config(target: Path, run_dir: Path, **changes: Any) -> GenerateConfig:
    return GenerateConfig(
        run_dir=str(run_dir), target=TargetConfig(str(target)), drafter=NgramConfig(min_match=1), **changes
    )


def test_an_answer_and_its_figures(
    tiny_text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_PROMPT", "When is the iron ready?")
    verb.run(_config(tiny_text_folder, tmp_path, max_new_tokens=400, stop=["never there"]))
    target = load_target(TargetConfig(str(tiny_text_folder)))
    prompt = target.text.encode_chat([{"role": "user", "content": "When is the iron ready?"}])
    plain = next(Decoder(target).run([Request(prompt, max_new_tokens=400)]))
    out = capsys.readouterr().out
    text, _, rest = out.rpartition("\n\naccepted draft tokens in ⟦ ⟧\n[ngram] ")
    assert text.replace("⟦", "").replace("⟧", "") == plain.text.translate(CONTROLS) and "⟦" in text
    assert "tokens a round (bonus included)" in rest and "plain decoding of the same prompt; same text" in rest
    path = Path(rest.splitlines()[-1])
    figures = json.loads(path.read_text())
    assert path == tmp_path / "generate.json" and figures["identical"] and figures["mean_acceptance_length"] > 1
    assert figures["num_emitted_tokens"] == len(plain.tokens) - 1


@pytest.mark.parametrize("prompt, line", [
    (" \n", "there is no prompt; give one"),
    ("caf\udce9", r"the prompt is not UTF-8 \(character 3\)"),
    ("iron " * 3000, r"the prompt has \d+ tokens, but the context of .* is 2048"),
])  # fmt: skip
def test_what_cannot_be_answered_gets_one_line_and_no_text(
    prompt: str, line: str, tiny_text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=line):
        verb.run(_config(tiny_text_folder, tmp_path, prompt=prompt))
    assert capsys.readouterr().out == ""


def test_a_draft_is_no_longer_than_the_heads_of_the_saved_drafter(tiny_text_folder: Path, tmp_path: Path) -> None:
    target = load_target(TargetConfig(str(tiny_text_folder)))
    saved = HydraConfig(num_heads=2, num_spec_tokens=2, draft_vocab_size=0, lookup=True)
    save_drafter(tmp_path / "drafter", build(saved, target), saved, target)
    cfg = _config(tiny_text_folder, tmp_path)
    cfg.drafter = HydraConfig(num_heads=5, num_spec_tokens=5)
    drafter, k = verb.find_drafter(cfg, target)
    assert (drafter.kind, k) == ("lookup+hydra", 2)


def test_a_suffix_lookup_needs_a_folder_for_its_pool_alone(tiny_text_folder: Path, tmp_path: Path) -> None:
    target, cfg = load_target(TargetConfig(str(tiny_text_folder))), _config(tiny_text_folder, tmp_path)
    cfg.drafter = SuffixConfig(pool_match=None)
    drafter, k = verb.find_drafter(cfg, target)
    assert (drafter.kind, drafter.pool, k) == ("suffix", None, 8)
    cfg.drafter = SuffixConfig()
    with pytest.raises(UserError, match="there is no drafter in"):
        verb.find_drafter(cfg, target)


def test_a_drafter_that_was_not_trained_is_named(tiny_text_folder: Path, tmp_path: Path) -> None:
    cfg = _config(tiny_text_folder, tmp_path, prompt="Hi")
    cfg.drafter = HydraConfig()
    with pytest.raises(UserError, match=r"there is no drafter in .*/drafter; run `make distill` first"):
        verb.run(cfg)
