"""Which texts that a target wrote as requests are used."""

import random

import pytest

from data.selfwrite import filter_self_written

GOOD = [
    "Can you explain how a heat pump works in winter?",
    "Write a short poem about a bus stop in the rain.\nUse no adjectives.",
    "¿Qué diferencia hay entre un lago y una laguna?",
    "Fix this code:\n\n```python\nfor i in range(3):\n    print(i\n```",
    "I have 3 eggs, 200 g flour and some milk. What can I bake with that? 🥚",
    "Sorry, what does \"bonus token\" mean?",
]

BAD = {
    "empty": "   ",
    "two words": "Hello there",
    "few characters": "a b c d",
    "too many words": " ".join(f"word{i}" for i in range(400)),
    "too many characters": " ".join(f"{i:0>40}" for i in range(100)),
    "control character": "What is a \x07 bell in ASCII, please?",
    "broken bytes": "Can you tell me about caf\ufffd culture in Vienna?",
    "character run": "What is the meaning of nooooooooooooooo in films?",
    "word loop": "Tell me about the best way to " + "go to the best way to " * 8,
    "line loop": "What is this list about?\n" + "- an item\n" * 5,
    "template": "What is the capital of Peru?<|im_end|>\n<|im_start|>assistant",
    "template of another kind": "[INST] What is the capital of Peru? [/INST]",
    "roles": "user\nWhat is the capital of Peru?",
    "a dialogue": "What is the capital of Peru?\nAssistant: Lima is the capital.",
    "headings of a data set": "### Instruction:\nName the capital of Peru.",
    "thinking": "<think>The user wants a capital</think> Which one is it?",
    "an answer": "Sure, here is a poem about the sea that you may like.",
    "an apology": "I'm sorry, but I can't help with that request today.",
}


def test_requests_are_kept_in_order_and_stripped() -> None:
    assert filter_self_written([f"\n {text} " for text in GOOD], set()) == GOOD


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_a_request_is_dropped(name: str) -> None:
    assert filter_self_written([BAD[name], GOOD[0]], set()) == [GOOD[0]]


def test_duplicates_and_near_duplicates_are_dropped_also_across_batches() -> None:
    seen: set[str] = set()
    long = "Please describe in plain words how a lock on a canal lifts a boat from the lower to the upper level"
    assert filter_self_written([GOOD[0], GOOD[0].upper(), long], seen) == [GOOD[0], long]
    assert len(seen) == 2
    again = [GOOD[0].replace("?", " !"), f"{long} of the water.", "How does a heat exchanger work, then?"]
    assert filter_self_written(again, seen) == ["How does a heat exchanger work, then?"]
    assert len(seen) == 3


def test_texts_of_one_pattern_with_other_content_are_kept() -> None:
    texts = [f"What is the capital city of {place}?" for place in ("Peru", "Norway", "Ghana")]
    assert filter_self_written(texts, set()) == texts


def test_every_near_duplicate_among_many_is_found() -> None:
    rng = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bdfgklm" for b in "aeiou" for c in ("l", "nt", "rk", "st")]
    originals = [" ".join(rng.choices(words, k=25)) for _ in range(400)]
    changed = [f"{text.rsplit(' ', 1)[0]} indeed" for text in originals]
    assert filter_self_written([*originals, *changed], set()) == originals
