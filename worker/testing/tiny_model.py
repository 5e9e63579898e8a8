"""Makes small Qwen3 checkpoints locally, without a download. Every byte follows from the arguments.

`make_tiny_model` has random weights. `make_witness_model` has weights whose greedy next token is a known
permutation of the vocabulary, different for each seed. So the tokens show which weights made them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

EOS_TOKEN_ID = 0
VOCAB_SIZE = 512
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
}
_RECIPE_FILE = "recipe.json"

_LAYER_GAIN = 0.2
"""The standard deviation of a layer's matrices times sqrt(fan in). The layers of a witness move its logits by a few
percent of the gap between the first token and the second."""
_HEAD_GAIN = 3.0
"""The scale of a witness's output rows. Its greedy token leads by more than 10 nats."""


def make_tiny_model(path: Path, seed: int, dtype: str = "float32", **shape: int) -> Path:
    """Writes a random checkpoint to `path`, unless the same one is there already. Returns `path`.

    `shape` overrides fields of the Qwen3Config (`hidden_size=…`). `dtype` is torch's name of the dtype.
    FileExistsError if the directory has anything else.
    """
    return _make("tiny", path, seed, dtype, shape, lambda model: None)


def make_witness_model(path: Path, seed: int, dtype: str = "float32", **shape: int) -> Path:
    """Writes a checkpoint whose greedy token after each `token` is `witness_next_token(seed, token)`."""
    return _make("witness", path, seed, dtype, shape, lambda model: _witness_weights(model, seed))


def witness_next_token(seed: int, token: int, vocab_size: int = VOCAB_SIZE) -> int:
    """Returns the greedy next token after `token` of the witness model of `seed`."""
    return permutation(f"witness {seed}", vocab_size)[token]


@lru_cache(maxsize=64)
def permutation(seed: str, vocab_size: int) -> list[int]:
    """Returns one cycle through all tokens but eos, which follows itself. So no output repeats early or ends by eos."""
    order = [token for token in range(vocab_size) if token != EOS_TOKEN_ID]
    random.Random(seed).shuffle(order)
    following = [EOS_TOKEN_ID] * vocab_size
    for token, after in zip(order, order[1:] + order[:1], strict=True):
        following[token] = after
    return following


def _make(
    kind: str, path: Path, seed: int, dtype: str, shape: dict[str, int], shape_weights: Callable[[Any], None]
) -> Path:
    path = Path(path)
    recipe = {"kind": kind, "seed": seed, "dtype": dtype, "shape": {**_SHAPE, **shape}}
    if _holds(path, recipe):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        made = Path(scratch) / "model"
        _write(made, recipe, shape_weights)
        try:
            made.rename(path)
        except OSError:
            # Another process may have made the same model first.
            if not _holds(path, recipe):
                raise FileExistsError(f"{path} is not empty, and does not have the model {recipe}") from None
    return path


def _holds(path: Path, recipe: dict[str, Any]) -> bool:
    """Returns whether `path` has the complete checkpoint: the recipe comes with the renamed scratch directory."""
    try:
        return bool(json.loads((path / _RECIPE_FILE).read_text()) == recipe)
    except (OSError, ValueError):
        return False


def _write(path: Path, recipe: dict[str, Any], shape_weights: Callable[[Any], None]) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = Qwen3Config(
        **{"tie_word_embeddings": False, **recipe["shape"]},
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(recipe["seed"])
        model = Qwen3ForCausalLM(config)
        shape_weights(model)
    model.to(getattr(torch, recipe["dtype"])).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    (path / _RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n")


def _witness_weights(model: Any, seed: int) -> None:
    """Sets the weights of a witness: output row `next(t)` points along input row `t`, and the random layers add
    a little noise. All witnesses of one shape have the same input rows, so one adapter fits each of them."""
    import torch

    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # norms
            weight.copy_(1.0 + 0.02 * torch.randn_like(weight))
        elif name.startswith("model.layers."):
            weight.normal_(0.0, _LAYER_GAIN / math.sqrt(weight.shape[1]))
    embeddings = model.model.embed_tokens.weight
    rows = torch.nn.functional.normalize(torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0)))
    embeddings.copy_(rows * math.sqrt(rows.shape[1]))
    following = torch.tensor(permutation(f"witness {seed}", rows.shape[0]))
    model.lm_head.weight[following] = _HEAD_GAIN * rows


def _tokenizer() -> Any:
    """Makes a byte-level BPE: the special tokens, every byte, then merges of two frequent letters up to 512 tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlcumwfgypbvk"
    pairs = [("Ġ", letter) for letter in letters] + [(a, b) for a in letters for b in letters]
    merges = pairs[: VOCAB_SIZE - len(tokens)]
    tokens += [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIAL_TOKENS[EOS_TOKEN_ID],
        pad_token=_SPECIAL_TOKENS[EOS_TOKEN_ID],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="worker.testing.tiny_model", description="Make a tiny Qwen3 checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="other seeds, other weights [0]")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments = parser.parse_args()
    make_tiny_model(arguments.directory, arguments.seed, arguments.dtype)
    print(arguments.directory)


if __name__ == "__main__":
    main()
