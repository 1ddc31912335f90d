"""One line from what Hydra and OmegaConf say in several."""

import re
from difflib import get_close_matches
from typing import Any, cast

from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from . import schema
from .errors import ConfigError
from .searching import SearchConfig

DRAFTERS = (
    schema.NgramConfig, schema.MedusaConfig, schema.HydraConfig, schema.Eagle3Config, schema.BlockConfig,
    schema.LmConfig, schema.EarlyExitConfig, schema.JumpConfig, schema.SuffixConfig,
)  # fmt: skip

# What OmegaConf says about a value of the wrong type -> what is allowed.
ALLOWED = (
    (r"to Float|of float", "a number"),
    (r"to Integer|of int", "a whole number"),
    (r"valid bool|of bool", "true or false"),
    (r"expected one of \[(.*)\]", r"\1"),
    (r"not a ListConfig", "a list, such as [a,b]"),
    (r"to string|of str", "text"),
    (r"not Optional", "a value, not null"),
    (r"to Dict", "names with values, such as {a: 1}"),
    (r"of (\w+)Config", "its keys, as key.name=value"),
)


def explain(error: BaseException) -> str:
    """What is wrong, where, and what is allowed."""
    chain = _chain(error)
    own = next((e for e in chain if isinstance(e, ConfigError)), None)
    if own is not None:
        return str(own)
    cause = next((e for e in reversed(chain) if isinstance(e, OmegaConfBaseException) and e.full_key), None)
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        return unknown_key(str(cause.full_key), cause.object_type)
    if isinstance(cause, ValidationError):
        return _wrong_type(cause)
    if cause is not None:
        return f"{cause.full_key}: {_first_line(cause)}"
    if isinstance(error, OverrideParseException):
        return f"override {error.override!r} can't be parsed ({_first_line(error)}); quote odd values: key='value'"
    return _from_text(error)


def unknown_key(key: str, kind: type | None = None) -> str:
    """A key that is not there, with the nearest one that is; `kind`: the dataclass that was asked for it."""
    if kind in DRAFTERS and key == "drafter.lora_rank":
        return f"{key}: a {cast(Any, kind).kind} drafter has nothing for a LoRA to adapt (lm, early_exit and jump have)"
    if kind in DRAFTERS:
        fields = sorted(cast(Any, kind).__dataclass_fields__)
        near = get_close_matches(key.removeprefix("drafter."), fields, 1)
        hint = f" (did you mean drafter.{near[0]}?)" if near else f"; it has {', '.join(fields)}"
        return f"{key} is not an option of the {cast(Any, kind).kind} drafter{hint}"
    near = get_close_matches(key, _known(), 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{key} is not a known option{hint}; `--help` lists all"


def _wrong_type(error: ValidationError) -> str:
    text = _first_line(error)
    found = ((re.search(pattern, text), words) for pattern, words in ALLOWED)
    allowed = next((match.expand(words) for match, words in found if match), text)
    value = "null" if error.value is None else repr(error.value)
    return f"{error.full_key} = {value} is not allowed; allowed: {allowed}"


def _from_text(error: BaseException) -> str:
    text = str(error)
    if match := re.search(r"In '([^']*)': (?:\w+) raised .*\n(.*)\n\s+full_key: (\S+)", text):
        return f"{match[3]}: {match[2]} (set by {match[1]})"
    if match := re.search(r"Sweep parameters '([^']+)'", text):
        return f"override {match[1]!r} stands for several values; give one: every run is a run of its own"
    if match := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(match[1])
    if match := re.search(r"Could not (?:load|find) '([^'/]+)/([^']+)'", text):
        return f"{match[1]} = {match[2]!r} is not an option; `--help` lists them"
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"override {match[1]!r} has several values; write a list as key=[a,b], text as key='a,b'"
    return _first_line(error)


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what it was raised from, outermost first."""
    out: list[BaseException] = []
    while error is not None:
        out.append(error)
        error = error.__cause__ or error.__context__
    return out


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _known() -> list[str]:
    known: list[str] = []
    roots = (
        schema.RunConfig, schema.PlanConfig, schema.GenerateConfig, schema.PublishConfig, schema.CertifyConfig,
        schema.CompareConfig, schema.CurveConfig, schema.RunsConfig, schema.SweepConfig,
        SearchConfig,
    )  # fmt: skip
    for root in roots:
        known += leaves(cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(root))))
    return known + [f"drafter.{name}" for kind in DRAFTERS for name in kind.__dataclass_fields__]


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of a nested dict."""
    out: list[str] = []
    for key, value in tree.items():
        out += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return out
