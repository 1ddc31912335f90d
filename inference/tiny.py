"""The tiny target: a 2-layer random Llama with a tokenizer trained on the spot; for tests and trials."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

_RECORD = "draftsmith.json"

_CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What the merges are learned from.
_CORPUS = """\
The smith heats the iron until it glows, then strikes it on the anvil while it is still soft. A small
hammer does most of the work; the large one is kept for the few strokes that decide the shape. When the
metal cools, the smith puts it back into the fire and begins again. Every stroke is a guess about how the
iron will move, and the iron answers. How do you know when the iron is ready? You look at the colour:
first red, then orange, then yellow. What happens when it is too hot? It burns, and sparks fly from it.
Which tools does a smith need? An anvil, a hammer, a pair of tongs, and water or oil to cool the finished
piece. Write a short story about a young smith who learns to listen to the metal. Summarize the text
above in one sentence. Translate the question into another language. Explain why the sum of the first ten
numbers is fifty-five: 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10 = 55.

def strike(iron, times):
    for count in range(times):
        iron = iron.bend(angle=count * 10)
    return iron

The teacher asked the class what they had learned. They had learned that the answer to a question is
often another question, that the shortest way is not always the fastest, and that it is better to try
something small, to look at what comes out, and to try again, than to think about the whole for a long
time without doing anything at all.
"""


def make_tiny_target(folder: Path, seed: int = 0) -> Path:
    """Write the tiny target (float32, tied head, 2,048 positions) into `folder` unless it is there already.

    Returns `folder`. Ids 0 to 2 are <|endoftext|>, <|im_start|> (BOS) and <|im_end|> (EOS and padding), as in
    the embedded target.
    """
    made_by = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    record: dict[str, str | int] = {"made_by": made_by, "seed": seed}
    if _has(folder, record):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        tokenizer = make_tiny_tokenizer()
        tokenizer.save_pretrained(made)
        _random_llama(len(tokenizer), seed).save_pretrained(made)
        (made / _RECORD).write_text(json.dumps(record) + "\n")
        _put(made, folder, record)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _put(made: Path, folder: Path, record: dict[str, str | int]) -> None:
    """Rename `made` to `folder`; an old version there gives way, the same one of a faster process stays."""
    try:
        os.replace(made, folder)
    except OSError:
        if not _has(folder, record):
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)


def _has(folder: Path, record: dict[str, str | int]) -> bool:
    try:
        return bool(json.loads((folder / _RECORD).read_text()) == record)
    except (OSError, ValueError):
        return False


def make_tiny_tokenizer() -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer of at most 512 tokens with the ChatML template; the same every time."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_CORPUS], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=2048,
    )
    tokenizer.chat_template = _CHATML
    return tokenizer


def _random_llama(vocab_size: int, seed: int) -> "LlamaForCausalLM":
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.3,  # at the usual 0.02 a random model repeats one token for ever
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
