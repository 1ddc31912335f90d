"""Overlap with held-out prompts is found, and a shared instruction is not taken for one."""

import random
from collections.abc import Sequence

from data.decontaminate import decontaminate, words_of
from data.prompt import Prompt

WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in ("l", "m", "nt", "rk", "st", "x")]
READ = "Read these passages and answer the question at the end. If the answer isn't there, say so."


def text(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def prompts(*texts: str | tuple[str, ...], family: str | None = None) -> list[Prompt]:
    turns = [(t,) if isinstance(t, str) else t for t in texts]
    return [Prompt(f"p{i}", "qa", "s", t, family=family) for i, t in enumerate(turns)]


def removed(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[str]:
    result = decontaminate(train, held_out)
    assert len(result.kept) + len(result.removed) == len(train)
    return [r.prompt.turns[0] for r in result.removed]


def test_thirteen_words_of_a_long_text_are_too_many_and_twelve_are_not() -> None:
    article = text(1, 100)
    piece = " ".join(article.split()[40:53])
    held_out = prompts(f"Summarize: {article}")
    for words, found in ((13, True), (12, False)):
        quoting = f"{text(2, 30)} {' '.join(piece.split()[:words])} {text(3, 30)}"
        assert bool(removed(prompts(quoting), held_out)) is found, words


def test_case_and_punctuation_do_not_hide_anything() -> None:
    article = text(1, 60)
    shouted = article.upper().replace(" ", ", ")
    assert removed(prompts(f"TL;DR\n{shouted}!"), prompts(f"Summarize: {article}"))


def test_a_short_question_is_found_inside_another_wording() -> None:
    held_out = prompts("Who was the first person to row across the lake?")
    assert removed(prompts("Tell me: who was the first person to row across the lake? Be brief."), held_out)
    assert not removed(prompts("Who was the first person to knit a map?"), held_out)


def test_a_very_short_one_only_when_it_is_all_there_is() -> None:
    held_out = prompts("Why is grass green?")
    assert removed(prompts("why is grass green"), held_out)
    assert not removed(prompts("Why is grass green? I mean in winter, when nothing else is."), held_out)


def test_a_long_instruction_alone_is_no_overlap() -> None:
    train = prompts(*(f"{READ}\n\n{text(i, 80)}" for i in range(20)))
    held_out = prompts(*(f"{READ}\n\n{text(100 + i, 80)}" for i in range(20)))
    assert removed(train, held_out) == []


def test_nor_is_one_at_the_end_nor_the_first_words_of_the_content_after_it() -> None:
    train = prompts(*(f"{READ} The {text(i, 80)}\n\n{READ}" for i in range(20)))
    held_out = prompts(*(f"{READ} The {text(100 + i, 80)}\n\n{READ}" for i in range(20)))
    assert removed(train, held_out) == []


def test_content_under_the_same_instruction_is_still_found() -> None:
    train = prompts(*(f"{READ}\n\n{text(i, 80)}" for i in range(20)))
    held_out = prompts(*(f"{READ}\n\n{text(i, 80)} {text(200, 5)}" for i in range(15, 25)))
    assert removed(train, held_out) == [p.turns[0] for p in train[15:]]


def test_an_instruction_that_frames_a_short_sentence() -> None:
    frame = "How would I write a small function in Rust that {}? Please explain the idea first."
    train = prompts(*(frame.format(text(i, 6)) for i in range(10)))
    held_out = prompts(*(frame.format(text(100 + i, 6)) for i in range(10)), frame.format(text(3, 6)))
    assert removed(train, held_out) == [train[3].turns[0]]


def test_many_questions_about_one_text_do_not_make_it_an_instruction() -> None:
    context = text(1, 90)
    train = prompts(*(f"{context}\n\nWhat about {text(i, 4)}?" for i in range(10)))
    held_out = prompts(*(f"{context}\n\nAnd what of {text(100 + i, 4)}?" for i in range(10)))
    assert len(removed(train, held_out)) == 10


def test_nor_does_one_family_in_many_wordings() -> None:
    sentence = text(1, 14)
    held_out = prompts(*(f"Translate: {sentence} {text(i, 8)}" for i in range(10)), family="one")
    assert removed(prompts(f"In English, please: {sentence}"), held_out)


def test_a_common_follow_up_does_not_count_and_a_rare_one_does() -> None:
    common, rare = text(1, 20), text(2, 20)
    train = prompts(*((text(10 + i, 20), common) for i in range(10)), (text(50, 20), rare))
    held_out = prompts(*((text(100 + i, 20), common) for i in range(5)), (text(200, 20), rare))
    assert removed(train, held_out) == [train[-1].turns[0]]


def test_scripts_without_spaces_are_compared_by_character() -> None:
    assert words_of("東京は Größe_1, don't") == ("東", "京", "は", "größe_1", "don", "t")
    held_out = prompts("東京の天気は明日どうなるか教えてください")
    assert removed(prompts("質問です。東京の天気は明日どうなるか教えてください。"), held_out)


def test_reasons_name_the_held_out_prompt_and_never_quote_it() -> None:
    article = text(1, 60)
    (found,) = decontaminate(prompts(f"x {article}"), prompts(f"Summarize: {article}")).removed
    assert found.reason == "13 words in a row in common with p0"


def test_many_prompts() -> None:
    train = prompts(*(f"{READ} {text(i, 60)}" for i in range(3000)))
    held_out = prompts(*(f"{READ} {text(2900 + i, 60)}" for i in range(300)))
    assert len(removed(train, held_out)) == 100


def test_no_held_out_prompts_and_no_words() -> None:
    assert removed(prompts("a b", "?!"), []) == []
    assert removed(prompts("?!"), prompts("...")) == []
