"""What a card owes a reader who hopes for more: baselines that do as well without the drafter, or without all of it."""

from typing import Any

from .page import number
from .records import runs
from .terminal import draft_tokens

RIVALS = {
    "ngram": "n-gram lookup tuned by itself", "ngram_same_length": "n-gram lookup with as long a draft",
    "untrained": "the drafter before training", "trained_alone": "its trained part alone",
}  # fmt: skip


def beaten(report: dict[str, Any]) -> str:
    """Each run in which a baseline emits as many tokens a round as the drafter, or more."""
    lines = []
    for name, temperature, entry in runs(report["acceptance"]):
        ours = entry["mean_acceptance_length"]
        for who, words in RIVALS.items():
            theirs = report["baselines"].get(who, {}).get(name, {}).get(temperature, {})
            length = theirs.get("mean_acceptance_length")
            if None not in (length, ours) and length >= ours:
                figures = f"{number(length)} tokens a round with {draft_tokens(theirs)} draft tokens"
                lines.append(f"- {name} {temperature}: {words} reaches {figures}, this {number(ours)} (bonus included)")
    return "\n\nBaselines that do as well:\n\n" + "\n".join(lines) if lines else ""
