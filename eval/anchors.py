"""Published acceptance of a draft token given that the earlier ones were accepted, to lay a report's figures beside.
For scale, not for comparison: other (larger) targets, other prompts, drafters trained on other data."""

from dataclasses import dataclass

Range = tuple[float, float]


@dataclass(frozen=True)
class Anchor:
    """rates: (lowest, highest) of each draft position."""

    name: str
    rates: tuple[Range, ...]
    source: str


def _exact(*rates: float) -> tuple[Range, ...]:
    return tuple((rate, rate) for rate in rates)


ANCHORS = (
    Anchor(
        "EAGLE, Vicuna 7B", _exact(0.79, 0.74, 0.72, 0.73, 0.67),
        "Li et al., arXiv:2401.15077, table 2: MT-bench, temperature 0, chains; n-α, the acceptance when n of the "
        "drafter's inputs are its own",
    ),
    Anchor(
        "EAGLE, LLaMA2-Chat 70B", _exact(0.75, 0.69, 0.65, 0.64, 0.64), "the same table",
    ),
    Anchor(
        "DeepSeek-V3, own MTP layer", ((0.85, 0.90),),
        "DeepSeek-AI, arXiv:2412.19437, section 5.4.3: one draft token, several kinds of text",
    ),
)  # fmt: skip
