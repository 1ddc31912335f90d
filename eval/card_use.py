"""The card's section on use: our own loop, a line for each engine that can serve the folder, what was checked."""

from collections.abc import Mapping, Sequence
from typing import Any

from .engines import Verdict, gguf_command

PYTHON = """```python
from conf.schema import TargetConfig
from inference.artifact import load_drafter
from inference.decode import Decoder, Request
from inference.load import load_target

target = load_target(TargetConfig("{target}"))
drafter, settings, _ = load_drafter("FOLDER", target)
prompt = target.text.encode_chat([{{"role": "user", "content": "..."}}])
decoder = Decoder(target, drafter, num_spec_tokens=settings.num_spec_tokens)
print(target.text.decode(next(decoder.run([Request(prompt, max_new_tokens=256)])).tokens))
```"""


def use(kind: str, target: str, layout: str | None, engines: Sequence[Verdict], checks: Sequence[str]) -> str:
    """The section; target: the name a user would give; layout None: our own files."""
    able = [verdict for verdict in engines if verdict.can]
    unable = [verdict for verdict in engines if not verdict.can]
    parts = ["## Use", own_loop(target), *[served(layout, able)] * bool(able)]
    if unable:
        parts.append("Not served by: " + "; ".join(f"{v.engine} ({v.how})" for v in unable) + ".")
    if layout is None:
        parts.append(f"The {kind} tensors are in draftsmith's own layout: `drafter.safetensors` and `drafter.json`.")
    if checks:
        parts.append("Checked before publishing:\n\n" + "\n".join(f"- {line}" for line in checks))
    return "\n\n".join(parts)


def own_loop(target: str) -> str:
    """In our own loop, from the shell and from Python."""
    return (
        "In draftsmith's own lossless loop, FOLDER being the downloaded folder or this repository's name:\n\n"
        f'    make generate PROMPT="..." ARGS="target={target} drafter.folder=FOLDER"\n\n'
        + PYTHON.format(target=target)
    )


def served(layout: str | None, able: Sequence[Verdict]) -> str:
    """A line an engine, with the version whose loader's rules the folder was checked against."""
    lines = [f"    {v.how}    # {v.engine} {v.version}" for v in able]
    command = gguf_command(layout, "FOLDER")
    if command and any(v.engine == "llama.cpp" for v in able):
        lines.append(f"    {command}    # for llama.cpp")
    return "By engines that load this layout (by their loaders' rules):\n\n" + "\n".join(lines)


def ran(found: Mapping[str, Mapping[str, Any]], digest: str) -> str:
    """The section on engines that this drafter (of these weights) and its lookup really ran in; empty without one.

    found: engines.json.
    """
    lines = [
        f"- {engine} {one['version']}, {kind}, {one['num_spec_tokens']} draft tokens: "
        f"{one['mean_acceptance_length']:.3f}, ours {one['ours']:.3f}; {one['identical_texts']} of {one['texts']} "
        "texts are those of the engine's own plain decoding"
        for engine, kinds in found.items()
        for kind, one in kinds.items()
        if "why" not in one and (one["weights_digest"] == digest or kind == "ngram")
    ]
    if not lines:
        return ""
    head = (
        "Greedy, on the same prompts; tokens a round (bonus included) as the engine counts them, and of our own loop "
        "counted the same way, with the engine's own lookup rule for `ngram`:"
    )
    return "\n\n".join(["## Run in engines", head, "\n".join(lines)])
