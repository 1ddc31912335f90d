"""inference/text.py: chat templates cut and continued, streaming text, stop strings, identities."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conf.errors import UserError
from inference.text import Detokenizer, StopChecker, Text, same_tokenizer
from inference.tiny import make_tiny_tokenizer

CHATML = Text(make_tiny_tokenizer(), "tiny", eos_ids=[2])
EOS = 2


def _sentencepiece_like() -> Text:
    """Metaspace words with byte fallback: the other family of tokenizers (Llama-2, Gemma, Mistral)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "▁b", "a", "b", "é"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b")]
    bpe = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return Text(tokenizer, "pieces", eos_ids=[2])


PIECES = _sentencepiece_like()
TEXTS = {"byte level": CHATML, "byte fallback": PIECES}


def _with_template(template: str | None, **kwargs: object) -> Text:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return Text(tokenizer, "other", eos_ids=[EOS], template_kwargs=kwargs)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


# Encoding and the chat template


def test_encode_adds_nothing_and_decode_skips_special_tokens() -> None:
    ids = CHATML.encode("Two  lines\n\n1. 2024 é東")
    assert CHATML.decode(ids) == "Two  lines\n\n1. 2024 é東"
    assert CHATML.decode([1, *ids, EOS]) == "Two  lines\n\n1. 2024 é東"
    assert CHATML.encode("") == []


def test_token_text_names_special_tokens_and_keeps_the_leading_space() -> None:
    assert CHATML.token_text(EOS) == "<|im_end|>"
    assert PIECES.token_text(PIECES.tokenizer.convert_tokens_to_ids("▁a")) == " a"
    assert [CHATML.token_text(i) for i in CHATML.encode("2024")] == list("2024")


def test_encode_chat_is_the_rendered_template() -> None:
    want = "<|im_start|>user\nHi<|im_end|>\n"
    assert CHATML.encode_chat([user("Hi")], add_generation_prompt=False) == CHATML.encode(want)
    assert CHATML.encode_chat([user("Hi")]) == CHATML.encode(want + "<|im_start|>assistant\n")


def test_user_turn_is_cut_out_of_the_template() -> None:
    assert CHATML.empty_user_prefix() == CHATML.encode("<|im_start|>user\n")
    assert CHATML.after_user() == CHATML.encode("<|im_end|>\n<|im_start|>assistant\n")
    around = [*CHATML.empty_user_prefix(), *CHATML.encode("Hi"), *CHATML.after_user()]
    assert around == CHATML.encode_chat([user("Hi")])


def test_missing_template_is_named() -> None:
    text = _with_template(None)
    assert not text.has_template and text.template_digest is None
    for call in (lambda: text.encode_chat([user("Hi")]), text.empty_user_prefix, text.after_user):
        with pytest.raises(UserError, match="target other has no chat template; "):
            call()


def test_template_that_refuses_or_drops_messages_is_named() -> None:
    refuses = _with_template("{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match=r"the chat template of other refuses .*\(system\): no system role"):
        refuses.encode_chat([{"role": "system", "content": "x"}])
    with pytest.raises(UserError, match="drops a message"):
        _with_template("nothing").empty_user_prefix()


def test_template_kwargs_reach_the_template_and_its_digest() -> None:
    template = "{{ messages[0]['content'] }}{% if think %}<think>{% endif %}"
    on, off = _with_template(template, think=True), _with_template(template, think=False)
    assert on.decode(on.encode_chat([user("Hi")])) == "Hi<think>"
    assert off.decode(off.encode_chat([user("Hi")])) == "Hi"
    digests = {on.template_digest, off.template_digest, CHATML.template_digest}
    assert len(digests) == 3 and _with_template(template, think=True).template_digest == on.template_digest


@pytest.mark.parametrize("ended", [True, False])
def test_continue_chat_keeps_response_ids_and_closes_the_turn_once(ended: bool) -> None:
    messages = [user("Which tools?")]
    prompt = CHATML.encode_chat(messages)
    # Not how the tokenizer would split this text: re-tokenising would change the ids.
    response = [i for char in "An anvil" for i in CHATML.encode(char)]
    assert response != CHATML.encode("An anvil")
    said = [*response, EOS] if ended else response
    ids = CHATML.continue_chat(prompt, said, messages, "An anvil", [user("And?")])
    glue = CHATML.encode("<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")
    assert ids == [*prompt, *response, *glue]


def test_continue_chat_equals_the_whole_conversation_over_three_turns() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("One?")]
    ids = CHATML.encode_chat(messages)
    for answer, question in (("1\n", "Two?"), ("2  ", "Three?")):
        ids = CHATML.continue_chat(ids, [*CHATML.encode(answer), EOS], messages, answer, [user(question)])
        messages += [assistant(answer), user(question)]
    assert ids == CHATML.encode_chat(messages)


def test_continue_chat_on_templates_that_trim_cut_thoughts_or_space_their_end_token() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] | trim }}]{% else %}"
        "{{ m['content'].split('</think>')[-1] | trim }} <|im_end|>{% endif %}{% endfor %}"
    )
    text = _with_template(template)
    prompt, answer = text.encode_chat([user("q")]), "<think>hm</think> yes \n"
    for said in ([*text.encode(answer), EOS], text.encode(answer)):
        ids = text.continue_chat(prompt, said, [user("q")], answer, [user("r")])
        glue = text.encode("[r]") if said[-1] == EOS else text.encode(" <|im_end|>[r]")
        assert ids == [*prompt, *said, *glue]


# Loading and identities


def test_load_reads_every_eos(tiny_text_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_text_folder, tmp_path / "copy"))
    assert Text.load(str(folder)).eos_ids == {2}
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert Text.load(str(folder)).eos_ids == {2, 7, 9}
    generation.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [5]}))
    assert Text.load(str(folder)).eos_ids == {2, 5}
    (folder / "config.json").unlink()
    assert Text.load(str(folder)).eos_ids == {2}


def test_load_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer could be loaded from ") as raised:
        Text.load(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_digest_survives_saving_and_sees_every_difference(tiny_text_folder: Path, tmp_path: Path) -> None:
    loaded = Text.load(str(tiny_text_folder))
    loaded.tokenizer.save_pretrained(tmp_path)
    again = Text.load(str(tmp_path))
    assert same_tokenizer(loaded, again) and same_tokenizer(loaded, CHATML)
    assert loaded.template_digest == again.template_digest == CHATML.template_digest
    other_split = make_tiny_tokenizer()
    other_split.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    one_more = make_tiny_tokenizer()
    one_more.add_tokens(["<tool>"])
    for tokenizer in (other_split, one_more):
        assert not same_tokenizer(CHATML, Text(tokenizer, "x"))
    assert not same_tokenizer(CHATML, PIECES)


# Streaming


@given(data=st.data())
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("family", TEXTS)
def test_streamed_text_of_any_ids_is_the_decoded_text(family: str, data: st.DataObject) -> None:
    text = TEXTS[family]
    written = st.text("ab é東\U0001f600\n", max_size=12).map(text.encode)
    # Arbitrary ids break characters apart; with byte fallback only whole texts are decoded the same in parts.
    anything = st.lists(st.integers(0, text.vocab_size - 1), max_size=12)
    ids = data.draw(written | anything if family == "byte level" else written)
    stream, told, at = Detokenizer(text), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 3))
        fresh = stream.push(ids[at : at + size])
        assert not fresh.endswith("\ufffd")
        told, at = told + fresh, at + size
    assert told + stream.flush() == text.decode(ids)


@pytest.mark.parametrize("family", TEXTS)
def test_an_unfinished_character_is_held_back(family: str) -> None:
    text = TEXTS[family]
    ids = text.encode("a東")[-3:]
    stream = Detokenizer(text)
    assert [stream.push([i]) for i in ids] == ["", "", "東"]
    half = Detokenizer(text)
    half.push(ids[:2])
    assert half.pending and set(half.flush()) == {"\ufffd"} and half.pending == ""


def _first_stop(text: Text, ids: list[int], strings: list[str]) -> tuple[int | None, str]:
    """By the definition: decode ever longer beginnings until one contains a stop string."""
    for count in range(1, len(ids) + 1):
        so_far = text.decode(ids[:count])
        found = [at for s in strings if (at := so_far.find(s)) >= 0]
        if found:
            return count, so_far[: min(found)]
    return None, text.decode(ids)


@given(
    written=st.text("ab \né東.", max_size=20),
    strings=st.lists(st.text("ab \né.", min_size=1, max_size=4), min_size=1, max_size=3),
    family=st.sampled_from(list(TEXTS)),
)
@settings(deadline=None, max_examples=200)
def test_stop_checker_agrees_with_the_definition(written: str, strings: list[str], family: str) -> None:
    text = TEXTS[family]
    ids = text.encode(written)
    checker = StopChecker(text, strings)
    stopped = next((n for n, i in enumerate(ids, 1) if checker.push(i)), None)
    want, cut = _first_stop(text, ids, strings)
    assert (stopped, checker.text) == (want, cut)


def test_stop_string_across_tokens_inside_a_token_and_as_a_special_token() -> None:
    def run(ids: list[int], *strings: str) -> tuple[list[bool], str]:
        checker = StopChecker(CHATML, strings)
        return [checker.push(i) for i in ids], checker.text

    letters = [i for char in "one END two" for i in CHATML.encode(char)]
    assert run(letters, "END") == ([False] * 6 + [True] * 5, "one ")
    token = CHATML.encode(" smith")
    assert len(token) == 1 and run(token, "mi") == ([True], " s")
    assert run([*CHATML.encode("a"), EOS], "<|im_end|>") == ([False, True], "a")
    assert run([*CHATML.encode("x"), *CHATML.encode("é")[:1]], "x") == ([True, True], "")
    assert run(letters) == ([False] * 11, "one END two")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="stop string is empty"):
        StopChecker(CHATML, ["", "x"])
