"""`make search`: trainings on one store with settings that Optuna chooses, for the longest rounds decoded live.

What is searched is written as for Hydra's own Optuna sweeper, which needs an Optuna of before version 3 and isn't used:

    make search ARGS="data.store=runs/x/store 'objective=choice(lk,e2e)' 'optim.lr=tag(log,interval(3e-4,3e-3))'"

Each trial is a training stage in run_dir/trials/N; the same command goes on after a kill, with the trial that it hit.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override

from conf.cli import INTERRUPTED, main
from conf.compose import load, quoted
from conf.errors import UserError
from conf.paths import read_json, record, run_dir, write_json
from conf.pipeline import run_stage
from conf.searching import SearchConfig, divided
from data.hub import store_folder

NAME = "search.json"
OF = "of"  # the study's attribute that says which search it is


def run(cfg: SearchConfig, fixed: Sequence[str], searched: Sequence[str]) -> None:
    """Train cfg.trials times; search.json, whose path is the last line, has every trial and the best.

    Raises UserError: nothing to search, no store, an impossible choice, another search's run_dir, or no trial that
    ended well.
    """
    spaces = [parsed(word) for word in searched]
    if not spaces:
        raise UserError("nothing to search: give a range, such as optim.lr=tag(log,interval(3e-4,3e-3))")
    named = cfg if cfg.run_dir else replace(cfg, name=f"search-{cfg.name}")
    folder, store = run_dir(named), store_folder(named)
    if not store.is_dir():
        raise UserError(f"no store at {store}: collect first (make collect), or name one with data.store")
    fixed = [word for word in fixed if not word.startswith(("run_dir=", "trials=", "data.store="))]
    fixed.append(f"data.store={quoted(str(store))}")
    for chosen in corners(spaces):
        load("train", [*fixed, *chosen])
    study = open_study(folder, cfg.seed, [*fixed, *searched])
    record(cfg, folder)
    for number, chosen in trials(study, spaces, cfg.trials):
        place = folder / "trials" / str(number)
        print(f"[{number + 1}/{cfg.trials}] {' '.join(chosen)}", flush=True)
        told(study, number, tau_of([*fixed, *chosen], place), place)
    write_json(folder / NAME, outcome(study, searched))
    print(folder / NAME)


def parsed(word: str) -> Override:
    """A word that conf.searching.divided found."""
    (override,) = OverridesParser.create().parse_overrides([word])
    return override


def ends(space: Override) -> list[str]:
    """Every choice, or both ends of an interval, as overrides."""
    value = space.value()
    if isinstance(value, IntervalSweep):
        return [f"{space.key_or_group}={end}" for end in (value.start, value.end)]
    return [f"{space.key_or_group}={choice}" for choice in space.sweep_string_iterator()]


def corners(spaces: Sequence[Override]) -> list[list[str]]:
    """Configurations that have each choice and each end once."""
    first = [ends(space)[0] for space in spaces]
    return [[*first[:i], end, *first[i + 1 :]] for i, space in enumerate(spaces) for end in ends(space)]


def distribution(space: Override) -> Any:
    """What Optuna draws from."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = space.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution(list(space.sweep_string_iterator()))
    low: Any = value.start
    high: Any = value.end
    log = "log" in value.tags
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def open_study(folder: Path, seed: int, search: Sequence[str]) -> Any:
    """The study in run_dir/study.log, made when missing. Raises UserError for that of another search."""
    import optuna  # which takes a second
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    backend = JournalFileBackend(str(folder / "study.log"))
    study = optuna.create_study(
        study_name="search", storage=optuna.storages.JournalStorage(backend), direction="maximize", load_if_exists=True
    )
    if study.user_attrs.setdefault(OF, list(search)) != list(search):
        raise UserError(f"{folder} holds a search over other settings; name another run_dir, or give those: "
                        f"{' '.join(study.user_attrs[OF])}")  # fmt: skip
    study.set_user_attr(OF, list(search))
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))  # one that goes on must not begin anew
    return study


def trials(study: Any, spaces: Sequence[Override], count: int) -> Iterator[tuple[int, list[str]]]:
    """(number, its overrides) of what is to be trained: first trials that were cut off, then new ones up to `count`."""
    drawn = {space.key_or_group: distribution(space) for space in spaces}
    for trial in study.trials:
        if not trial.state.is_finished() and trial.params.keys() == drawn.keys():
            yield trial.number, words(trial.params)
        elif not trial.state.is_finished():
            tell(study, trial.number, None)  # cut off while it was drawn
    while len(study.trials) < count:
        trial = study.ask(drawn)
        yield trial.number, words(trial.params)


def words(params: Mapping[str, Any]) -> list[str]:
    """As overrides."""
    return [f"{key}={value}" for key, value in params.items()]


def tau_of(overrides: Sequence[str], place: Path) -> float | None:
    """Live τ of the best checkpoint of a training (bonus included); None when it failed, and its log says why."""
    place.mkdir(parents=True, exist_ok=True)
    code = run_stage("train", [*overrides, f"run_dir={quoted(str(place))}"], place / "train.log")
    if code == INTERRUPTED:
        raise KeyboardInterrupt("the search was interrupted; the same command goes on with this trial")
    best = read_json(place / "timing" / "train.json").get("best") if code == 0 else None
    return best["tau"] if best else None


def told(study: Any, number: int, tau: float | None, place: Path) -> None:
    """Tell the study, and people."""
    tell(study, number, tau)
    if tau is None:
        print(f"  failed: see {place / 'train.log'}", flush=True)
    else:
        print(f"  live τ {tau:.3f} (bonus included); best so far {study.best_value:.3f}", flush=True)


def tell(study: Any, number: int, tau: float | None) -> None:
    """None: it failed."""
    from optuna.trial import TrialState

    study.tell(number, tau, state=TrialState.FAIL if tau is None else TrialState.COMPLETE)


def outcome(study: Any, searched: Sequence[str]) -> dict[str, Any]:
    """search.json. Raises UserError when no trial ended well."""
    ended = [{"trial": t.number, "tau": t.value, "overrides": words(t.params)} for t in study.trials]
    good = [trial for trial in ended if trial["tau"] is not None]
    if not good:
        raise UserError("no trial ended well: see the train.log of each in trials/")
    best = max(good, key=lambda trial: trial["tau"])
    print(f"best: {' '.join(best['overrides'])}: live τ {best['tau']:.3f} (bonus included)", flush=True)
    return {"best": best, "trials": ended, "searched": list(searched)}


if __name__ == "__main__":
    FIXED, SEARCHED = divided(sys.argv[1:])
    main("search", lambda cfg: run(cfg, FIXED, SEARCHED), FIXED)
