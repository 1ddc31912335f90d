"""`make generate PROMPT="..."`: stream a continuation with the drafter, accepted tokens marked."""

import os

from conf.cli import main
from conf.errors import UserError
from conf.paths import run_dir, write_json
from conf.schema import GenerateConfig

from .acceptance import Counts, Round
from .artifact import draft_length, load_drafter
from .decode import Decoder, Request
from .drafters import Drafter, adapt, build, reshape
from .load import load_target
from .sampling import Sampling
from .show import Printer
from .stream import StopChecker
from .target import Target


def run(cfg: GenerateConfig) -> None:
    """Stream, then print τ and the speed-up over plain decoding of the same prompt.

    Raises UserError: no prompt or one that does not fit, no drafter, a drafter of another target.
    """
    prompt = prompt_of(cfg)
    target = load_target(cfg.target)
    drafter, k = find_drafter(cfg, target)
    request = Request(
        target.text.encode_chat([{"role": "user", "content": prompt}]),
        max_new_tokens=cfg.max_new_tokens,
        stop=tuple(cfg.stop),
    )
    try:
        rounds = show(target, decoder(cfg, target, drafter, k), request)
        summary(cfg, target, drafter, k, request, rounds)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("the answer was interrupted; its figures were not taken") from stop


def prompt_of(cfg: GenerateConfig) -> str:
    """`prompt`, or the environment's DRAFTSMITH_PROMPT. Raises UserError when there is none or it is not text."""
    prompt = cfg.prompt if cfg.prompt is not None else os.environ.get("DRAFTSMITH_PROMPT", "")
    if not prompt.strip():
        raise UserError('there is no prompt; give one: make generate PROMPT="Why is the sky blue?"')
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not UTF-8 (character {error.start}); give it as UTF-8") from error
    return prompt


def find_drafter(cfg: GenerateConfig, target: Target) -> tuple[Drafter, int]:
    """(drafter, draft length): drafter.folder (a folder or hub id), the run's own, or lookup, which needs no training.

    Raises UserError when nothing was trained yet.
    """
    folder = run_dir(cfg) / "drafter"
    if cfg.drafter.folder is None and not folder.exists():
        if cfg.drafter.needs_no_folder:
            return build(cfg.drafter, target), cfg.drafter.num_spec_tokens
        raise UserError(f"there is no drafter in {folder}; run `make distill` first or set drafter.folder")
    drafter, saved, _ = load_drafter(cfg.drafter.folder or folder, target)
    reshape(drafter, cfg.drafter, target)
    adapt(drafter, saved, cfg.drafter)
    wanted = draft_length(cfg.drafter, saved)
    return drafter, min(wanted, drafter.longest(wanted))


def decoder(cfg: GenerateConfig, target: Target, drafter: Drafter | None, k: int) -> Decoder:
    """The loop with the sampling of the configuration."""
    sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, cfg.repetition_penalty)
    return Decoder(target, drafter, sampling=sampling, num_spec_tokens=k, seed=cfg.seed, rule=cfg.bench.rule)


def show(target: Target, loop: Decoder, request: Request) -> list[Round]:
    """Print tokens as they come, accepted draft tokens marked. Returns the rounds (prefill's left out).

    Raises UserError, before anything is printed, when the prompt does not fit the target's context.
    """
    printer, rounds = Printer(StopChecker(target.text, request.stop)), []
    try:
        for r in loop.stream(request):
            rounds.append(r)
            for i, token in enumerate(r.emitted):
                printer.push(token, i < r.accepted)
    finally:
        printer.close()
    print(f"\naccepted draft tokens {printer.legend}")
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
        figures["speedup"] = per_token[0] / per_token[1]
        line += f"; {figures['speedup']:.2f}x plain decoding of the same prompt"
        if cfg.temperature == 0:
            figures["identical"] = plain.tokens == fast.tokens
            differ = "; texts differ: `make evaluate` tells a near-tie from an error"
            line += "; same text" if figures["identical"] else differ
    print(f"[{drafter.kind}] {line}")
    write_json(run_dir(cfg) / "generate.json", figures)
    print((run_dir(cfg) / "generate.json").resolve())


if __name__ == "__main__":
    main("generate", run)
