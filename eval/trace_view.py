"""Generations with the origin of every token, on a page: all of it, or round by round with a slider."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Piece = tuple[str, str]
"""(what became of it: note, accepted, lookup, bonus, prefill or rejected; text)"""


@dataclass(frozen=True)
class Trace:
    """One generation. rounds: the pieces of each; the first has the prompt and the token that prefill yields."""

    title: str
    rounds: Sequence[Sequence[Piece]]


LEGEND = (
    "<p><span class='accepted'>accepted draft</span> <span class='lookup'>accepted, from prompt lookup</span> "
    "<span class='bonus'>bonus token</span> <span class='rejected'>rejected draft</span> "
    "<span class='prefill'>first token</span></p>"
)
PLAYER = (
    "<div class='player'><button type='button' aria-label='a round back'>‹</button>"
    "<input type='range' min='0' max='{last}' value='{last}' aria-label='round'>"
    "<button type='button' aria-label='a round on'>›</button><output></output></div>"
)

# Rounds after the chosen one are out of sight, the chosen one is marked. At the end, as at first, all are shown.
SCRIPT = """
document.querySelectorAll('section.generation').forEach(section=>{
const rounds=[...section.querySelectorAll('.round')],last=rounds.length-1;
const slider=section.querySelector('input'),said=section.querySelector('output');
const [back,on]=section.querySelectorAll('button');
const show=()=>{const n=+slider.value;
rounds.forEach((r,i)=>{r.classList.toggle('later',i>n);r.classList.toggle('now',i===n&&n<last&&n>0)});
said.textContent=rounds[n].dataset.say;back.disabled=n===0;on.disabled=n===last};
back.onclick=()=>{slider.value=+slider.value-1;show()};
on.onclick=()=>{slider.value=+slider.value+1;show()};
slider.oninput=show;show()});
"""


def trace_section(traces: Sequence[Trace]) -> str:
    """Generations with every token coloured by its origin; SCRIPT makes their sliders work."""
    if not traces:
        return "<p class='note'>Not shown (bench.show_text).</p>"
    return LEGEND + "".join(map(_generation, traces))


def _generation(trace: Trace) -> str:
    spans, emitted = [], 0
    for number, pieces in enumerate(trace.rounds):
        emitted += sum(kind not in ("note", "rejected") for kind, _ in pieces)
        said = say(number, len(trace.rounds) - 1, pieces, emitted)
        text = "".join(f"<span class='{escape(kind)}'>{escape(text)}</span>" for kind, text in pieces)
        spans.append(f"<span class='round' data-say='{escape(said)}'>{text}</span>")
    player = PLAYER.format(last=len(trace.rounds) - 1)
    return (
        f"<section class='generation'><h3>{escape(trace.title)}</h3>{player}"
        f"<pre class='trace'>{''.join(spans)}</pre></section>"
    )


def say(number: int, last: int, pieces: Sequence[Piece], emitted: int) -> str:
    """A round in words: what was drafted and accepted, and the tokens up to its end."""
    kinds = [kind for kind, _ in pieces]
    if number == 0:
        return f"round 0 of {last}: the prompt, and the token that prefill yields"
    accepted, looked_up = kinds.count("accepted") + kinds.count("lookup"), kinds.count("lookup")
    drafted = accepted + kinds.count("rejected")
    where = " (from prompt lookup)" if looked_up else ""
    return f"round {number} of {last}: {accepted} of {drafted} draft tokens accepted{where}; {emitted} tokens so far"
