"""Text and token ids: tokenizer and chat template (its only home); stream.py has text that comes bit by bit.

Knows nothing about tensors. Ids that a model emitted are never turned into text and back.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from conf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]

# Stands where a text would stand in a rendered template, so that what comes before and after can be cut out.
_MARK = "DRAFTSMITH-CUTS-HERE"

# Tokenizers with one vocabulary may still split text differently: newlines, spaces, digits, accents, code.
_PROBE = (
    "\n\n1. It's  2024,   3.14159; naïve cafe\u0301 — 東京 ĀЖ \U0001f469\u200d\U0001f467\t\r\n    def f(x):\n"
    "        return x['k'] != \"v\"  ALLCAPS camelCase don't I'll <|im_start|>x</s> end   \n\n\n"
)


class Text:
    """A tokenizer with its chat template and the ids that end a response."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        name: str,
        eos_ids: Iterable[int] = (),
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """`name` is what errors call it; `template_kwargs` (enable_thinking, ...) go into every rendering."""
        self.tokenizer = tokenizer
        self.name = name
        self.eos_ids = frozenset(eos_ids)
        self.template_kwargs = dict(template_kwargs or {})
        self.vocab_size = len(tokenizer)  # a model's head may have more rows (padding)

    @classmethod
    def load(
        cls,
        folder_or_id: str,
        revision: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> "Text":
        """Load from a folder or a hub id. Raises UserError when there is no tokenizer that loads."""
        from transformers import AutoTokenizer

        where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder_or_id, **where)
        except Exception as error:  # damaged files fail in many ways, tokenizers' own with a bare Exception
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"no tokenizer could be loaded from {folder_or_id}: {reason}") from error
        return cls(tokenizer, folder_or_id, _find_eos(folder_or_id, tokenizer, where), template_kwargs)

    @cached_property
    def tokenizer_digest(self) -> str:
        """Digest of what the tokenizer does (vocabulary with ids, how it splits), not of its files."""
        return _digest([sorted(self.tokenizer.get_vocab().items()), self.encode(_PROBE)])

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone: no special token is added (one spelled out in the text is recognised)."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens are skipped, bytes that are not UTF-8 become U+FFFD."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def token_text(self, token_id: int) -> str:
        """One token for showing: special tokens by name, the leading space kept."""
        text = str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        hidden_space = isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" ")
        return " " + text if hidden_space else text

    # The chat template

    @property
    def has_template(self) -> bool:
        """Whether chat messages can be encoded at all (base models often have no template)."""
        return bool(self.tokenizer.chat_template)

    @property
    def template_digest(self) -> str | None:
        """Digest of the chat template and its kwargs; None without a template."""
        if not self.has_template:
            return None
        return _digest([self.tokenizer.chat_template, self.template_kwargs])

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation ({"role", "content"}), ready for the answer when `add_generation_prompt`.

        Raises UserError without a chat template, or when the template refuses the messages.
        """
        return self.encode(self._render(messages, add_generation_prompt))

    def continue_chat(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        messages: Sequence[Message],
        response_text: str,
        next_messages: Sequence[Message],
    ) -> list[int]:
        """Ids of the next turn's prompt: prompt and response verbatim, then the template's text of the rest.

        `messages` led to `prompt_ids`; `response_text` is the answer as text, only to render what follows it.
        An end-of-turn token that the response already ends with is not doubled.
        """
        answer = {"role": "assistant", "content": response_text + _MARK}
        _, after = self._cut([*messages, answer, *next_messages], add_generation_prompt=True)
        glue = self.encode(after)
        return [*prompt_ids, *response_ids, *self._without_leading_eos(glue, response_ids)]

    def empty_user_prefix(self) -> list[int]:
        """Ids of the template up to the user's text: a target that continues them writes a request."""
        return self.encode(self._cut_user()[0])

    def after_user(self) -> list[int]:
        """Ids that close a user's turn and open the assistant's."""
        return self.encode(self._cut_user()[1])

    def _cut_user(self) -> tuple[str, str]:
        return self._cut([{"role": "user", "content": _MARK}], add_generation_prompt=True)

    def _cut(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, str]:
        before, mark, after = self._render(messages, add_generation_prompt).partition(_MARK)
        if not mark:
            raise UserError(f"the chat template of {self.name} drops a message; turns can't be continued")
        return before, after

    def _without_leading_eos(self, glue: list[int], response_ids: Sequence[int]) -> list[int]:
        """Drop the glue's end-of-turn (some templates put a space before it) if the response ends with it."""
        last = response_ids[-1] if response_ids else None
        if last not in self.eos_ids or last not in glue:
            return glue
        at = glue.index(last)
        return glue[at + 1 :] if not self.decode(glue[:at]).strip() else glue

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template knows a system role; without it, that text stands before the first user's."""
        try:
            self._apply([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], True)
        except UserError:
            return False
        return True

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if not self.has_template:
            raise UserError(
                f"target {self.name} has no chat template; name an instruction-tuned target, "
                "or put a chat_template.jinja into its folder"
            )
        if [m.get("role") for m in messages[:2]] == ["system", "user"] and not self.takes_system:
            system, user, *rest = messages
            messages = [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]
        return self._apply(messages, add_generation_prompt)

    def _apply(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self.template_kwargs,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template of {self.name} refuses the conversation ({roles}): {error}"
            ) from error


def same_tokenizer(a: Text, b: Text) -> bool:
    """Whether both map the same tokens to the same ids and split text alike (special roles may differ)."""
    return a.tokenizer_digest == b.tokenizer_digest


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _find_eos(folder_or_id: str, tokenizer: "PreTrainedTokenizerBase", where: dict[str, Any]) -> set[int]:
    """Ids that end a response: the tokenizer's and generation_config's; config's only without the latter.

    Raises UserError for a damaged generation_config.json: without its ids a response would not end.
    """
    from transformers import GenerationConfig

    found = _ids(tokenizer.eos_token_id)
    try:
        declared = _ids(GenerationConfig.from_pretrained(folder_or_id, revision=where["revision"]).eos_token_id)
    except (OSError, TypeError, ValueError) as error:
        if not isinstance(error, OSError) or isinstance(error.__context__, ValueError):
            raise UserError(f"generation_config.json of {folder_or_id}: {' '.join(str(error).split())}") from error
        declared = set()  # there is none
    if not declared:
        declared = _config_eos(folder_or_id, where)
    return found | declared


def _config_eos(folder_or_id: str, where: dict[str, Any]) -> set[int]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder_or_id, **where)
    except (OSError, ValueError):  # a folder with a tokenizer alone
        return set()
    return _ids(getattr(config.get_text_config(), "eos_token_id", None))


def _ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    ids = {value} if isinstance(value, int) else set(value)
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"eos_token_id = {value!r} is not a number or a list of numbers")
    return ids
