"""inference/text.py: chat templates cut and continued, streaming text, stop strings, identities."""

import json
import shutil
from pathlib import Path

import pytest
from texts import CHATML, PIECES
from tokenizers import pre_tokenizers

from conf.errors import UserError
from inference.text import Text, same_tokenizer
from inference.tiny import make_tiny_tokenizer

EOS = 2


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
    with pytest.raises(UserError, match=r"refuses the conversation \(user\): can only concatenate"):
        _with_template("{{ messages[0]['content'] + 3 }}").encode_chat([user("Hi")])
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
