"""The two families of tokenizers, made on the spot."""

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from inference.text import Text
from inference.tiny import make_tiny_tokenizer

CHATML = Text(make_tiny_tokenizer(), "tiny", eos_ids=[2])


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
