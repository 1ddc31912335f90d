"""`make generate PROMPT="..."`: stream a continuation with the drafter, accepted tokens marked."""

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text as Styled

from conf.cli import main
from conf.errors import UserError
from conf.paths import run_dir, write_json
from conf.schema import GenerateConfig

from .acceptance import Counts, Round
from .artifact import load_drafter
from .decode import Decoder, Request
from .drafters import Drafter
from .load import load_target
from .sampling import Sampling
from .target import Target
from .text import Detokenizer

STYLES = {"accepted": "green", "bonus": "default"}


def run(cfg: GenerateConfig) -> None:
    """Stream, then print τ and the speed-up over plain decoding of the same prompt.

    Raises UserError: no prompt, no drafter, a drafter of another target.
    """
    prompt = cfg.prompt if cfg.prompt is not None else os.environ.get("DRAFTSMITH_PROMPT", "")
    if not prompt.strip():
        raise UserError('there is no prompt; give one: make generate PROMPT="Why is the sky blue?"')
    folder = Path(cfg.drafter.folder) if cfg.drafter.folder else run_dir(cfg) / "drafter"
    if not folder.exists():
        raise UserError(f"there is no drafter in {folder}; run `make distill` first or set drafter.folder")
    target = load_target(cfg.target)
    drafter, own, _ = load_drafter(folder, target)
    request = Request(
        target.text.encode_chat([{"role": "user", "content": prompt}]),
        max_new_tokens=cfg.max_new_tokens,
        stop=tuple(cfg.stop),
    )
    rounds = show(target, decoder(cfg, target, drafter, own.num_spec_tokens), request)
    summary(cfg, target, drafter, own.num_spec_tokens, request, rounds)


def decoder(cfg: GenerateConfig, target: Target, drafter: Drafter | None, k: int) -> Decoder:
    """The loop with the sampling of the configuration."""
    sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, cfg.repetition_penalty)
    return Decoder(target, drafter, sampling=sampling, num_spec_tokens=k, seed=cfg.seed)


def show(target: Target, loop: Decoder, request: Request) -> list[Round]:
    """Print tokens as they come: accepted draft tokens green. Returns the rounds (prefill's left out)."""
    console = Console(highlight=False, soft_wrap=True)
    pieces, rounds = Detokenizer(target.text), []
    for r in loop.stream(request):
        rounds.append(r)
        for i, token in enumerate(r.emitted):
            style = STYLES["accepted" if i < r.accepted else "bonus"]
            console.print(Styled(pieces.push([token]), style=style), end="")
        sys.stdout.flush()
    console.print(Styled(pieces.flush()))
    return rounds[1:]


def summary(
    cfg: GenerateConfig, target: Target, drafter: Drafter, k: int, request: Request, rounds: list[Round]
) -> None:
    """τ, bonus included, and the measured speed-up (both ways decoded again, one after the other).

    The figures, no text, go to run_dir/generate.json, whose path is the last line.
    """
    counts = Counts().add(rounds)
    figures = counts.summary(k)
    line = f"{counts.mean_acceptance_length:.2f} tokens a round (bonus included), {counts.rounds} rounds"
    if cfg.compare and rounds:
        fast = next(decoder(cfg, target, drafter, k).run([request]))
        plain = next(decoder(cfg, target, None, k).run([request]))
        per_token = [r.seconds / max(len(r.tokens) - 1, 1) for r in (plain, fast)]
        figures |= {"speedup": per_token[0] / per_token[1], "identical": plain.tokens == fast.tokens}
        line += f"; {figures['speedup']:.2f}x plain decoding of the same prompt"
        if cfg.temperature == 0:
            line += "; same text" if figures["identical"] else "; texts differ (a near-tie in float32)"
    print(f"\n[{drafter.kind}] {line}")
    write_json(run_dir(cfg) / "generate.json", figures)
    print(run_dir(cfg) / "generate.json")


if __name__ == "__main__":
    main("generate", run)
