"""The front door of every stage: overrides in, one line and an exit code out."""

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import yaml
from omegaconf import OmegaConf

from .compose import GROUPS, load, options
from .digest import plain
from .errors import UserError

NO_READER = 1
INTERRUPTED = 130
FULL = {
    errno.ENOSPC: ("no space left on the disk", "free some"),
    errno.EDQUOT: ("no space left on the disk", "free some"),
    errno.EFBIG: ("a file has reached the size limit", "raise it (ulimit -f)"),
}
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR)


def main(config_name: str, run: Callable[[Any], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Parse Hydra overrides, compose and validate, call run(cfg), exit.

    Exit codes: 0; 1 when nobody reads the output any more; 2 for a mistake the user can mend (one line on stderr);
    130 when interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not end a run
    signal.signal(signal.SIGTERM, _interrupt)
    code = guarded(lambda: _run(config_name, run, argv))
    if code == NO_READER:  # or the interpreter would complain when it flushes what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run(config_name: str, run: Callable[[Any], None], argv: Sequence[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text(config_name, [a for a in argv if a not in ("--help", "-h")]))
        return
    cfg = load(config_name, argv_overrides(argv))
    if "--cfg" in argv:
        print(yaml.safe_dump(plain(cfg), sort_keys=False).rstrip())
        return
    use_threads(cfg.launcher.threads)
    run(cfg)


def use_threads(threads: int) -> None:
    """Processor threads of this process and of those it starts; 0 leaves them as they are.

    The variable acts where torch is imported later. Where a stage's own imports brought it already, torch is told.
    """
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(threads)


def argv_overrides(argv: Sequence[str]) -> list[str]:
    """The Hydra overrides of a command line. Raises UserError for an unknown flag."""
    for arg in argv:
        if arg.startswith("-") and arg != "--cfg":
            raise UserError(f"{arg} is not a known flag; use --help, --cfg, or Hydra overrides such as optim.lr=1e-3")
    return [arg for arg in argv if arg != "--cfg"]


def guarded(action: Callable[[], None]) -> int:
    """Run `action`; user errors, a full disk and Ctrl-C become one line. DRAFTSMITH_DEBUG=1 shows tracebacks."""
    try:
        action()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if (end := ending(error)) is None:
            raise
        code, line = end
        return _say(error, line, code) if line else code
    return 0


def ending(error: BaseException) -> tuple[int, str] | None:
    """Exit code and the line to say for what is nobody's bug; None for a bug."""
    match error:
        case UserError():
            return 2, str(error)
        case KeyboardInterrupt():
            return INTERRUPTED, str(error) or "interrupted; the same command goes on where it stopped"
        case BrokenPipeError():
            return NO_READER, ""
        case OSError(errno=number) if number in NOT_WRITABLE and error.filename:
            return 2, f"{error.filename}: {error.strerror}; mend that or name another place (run_dir)"
        case OSError(errno=number) if number in FULL:
            what, cure = FULL[number]
            where = error.filename or "write failed"
            return 2, f"{what} ({where}); {cure} and run the same command again: it goes on where it stopped"
    return None


def _say(error: BaseException, line: str, code: int) -> int:
    if os.environ.get("DRAFTSMITH_DEBUG") == "1":
        traceback.print_exception(error)
    sys.stdout.flush()
    word = "stopped" if code == INTERRUPTED else "error"
    print(f"{word}: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return code


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt("terminated; the same command goes on where it stopped")


def help_text(config_name: str, overrides: Sequence[str]) -> str:
    """Groups with their options, then every key with its default."""
    cfg = OmegaConf.to_yaml(OmegaConf.create(plain(load(config_name, overrides))))
    groups = "\n".join(f"  {group}: {', '.join(options(group))}" for group in GROUPS)
    return (
        f"Options of this stage ({config_name}), as Hydra overrides: key=value\n\n"
        f"Groups (group=option; target and drafter also take a hub id or a folder)\n{groups}\n\n"
        f"Keys and their values with these overrides\n"
        + "\n".join(f"  {line}" for line in cfg.rstrip().splitlines())
        + "\n\nFlags: --help, --cfg (print the composed configuration). DRAFTSMITH_DEBUG=1 shows tracebacks."
    )
