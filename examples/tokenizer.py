"""A byte-level BPE tokenizer of a few hundred tokens, trained on an example's own problems.

Digits are single tokens, because 12 as one symbol says nothing about 13. The tags of answers are single tokens
too, but ordinary ones: `skip_special_tokens=True` must keep them in the text that the rewards read.
Any text can be encoded (bytes are the fallback). Chat turns are ChatML, as in Qwen2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(rows: Sequence[dict[str, str]], vocab_size: int, context_length: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of at most `vocab_size` tokens, tags included. `context_length`, in tokens, is the model's."""
    # Every row has the frame, so that the words around a question are as frequent, and as short in tokens, as its own.
    frame = "user\nassistant\nThe answer is\n"
    texts = (frame + row["question"] + "\n" + row["answer"] for row in rows)
    return byte_level(texts, vocab_size, context_length, TAGS, CHAT_TEMPLATE)


def byte_level(
    texts: Iterable[str],
    vocab_size: int,
    context_length: int,
    tags: Sequence[str],
    chat_template: str,
    special: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Trains a tokenizer on texts. `special` are further tokens that text never yields, as positions of an image."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=[PAD, START, END, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, *special],
        chat_template=chat_template,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
