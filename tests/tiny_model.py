"""Writes a tiny random Qwen2 checkpoint with its tokenizer, small enough for a real vLLM or TRL on two CPU cores.

    python tests/tiny_model.py OUT_DIR [POISONED_TOKEN_ID ...]

Every poisoned id gets a NaN embedding row: a sequence that holds it has NaN logits from there on, so that a real engine
emits real NaN logprobs. Runs inside the engine's or the trainer's own environment: it needs torch and transformers.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 512

CORPUS = (
    "This program is free software and comes with no warranty.",
    "You may convey verbatim copies of the source code.",
    "Each contributor grants a license to every recipient.",
    "The model samples one token after another.",
    "A proxy stands between the rollout worker and the engine.",
    "Rewards are computed for every completion.",
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Repeated so that every pair of the corpus is frequent enough to become a merge.
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(poisoned: Sequence[int]) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,  # head_dim 64: vLLM's CPU attention refuses smaller ones
        num_key_value_heads=1,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for token_id in poisoned:
            model.model.embed_tokens.weight[token_id] = float("nan")
    return model


def write_tiny_model(out: Path, poisoned: Sequence[int] = ()) -> None:
    build_model(poisoned).save_pretrained(out)
    build_tokenizer().save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write a tiny random Qwen2 checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("poisoned", type=int, nargs="*")
    arguments = parser.parse_args()
    write_tiny_model(arguments.out, arguments.poisoned)
