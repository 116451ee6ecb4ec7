"""A tiny seeded Qwen3 whose output depends on its context.

A checkpoint from a usual initialiser would not do for tests: with weights that small each
token's own embedding decides the next one, and a wrong KV cache goes unseen. Linear weights of
variance 1 / fan-in over unit-variance embeddings let every layer count, and the scale of the
query and key norms makes attention pick out single positions.
"""

from __future__ import annotations

import itertools
import json
import math
import string
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTEXT_LENGTH = 32768
_MARK = "cacheflow_tiny_model"
_END_OF_TURN = "<|im_end|>"
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", _END_OF_TURN)
_ATTENTION_SHARPNESS = 1.8
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """What the model is made from: the same recipe gives the same bytes.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream, a multiple of `heads`.
        heads: query heads.
        kv_heads: key and value heads, a divisor of `heads`.
        vocab: entries of the embedding, 512 to 16384.
        dtype: `float32` or `bfloat16`.
        seed: of the weights.

    Raises:
        ValueError: a value is out of the range above; the message names it.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 2048
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers is {self.layers}; it must be at least 1")
        if self.heads < 1 or self.hidden < 1 or self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden is {self.hidden}; it must be a multiple of 2 x heads ({2 * self.heads})"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; it must divide heads ({self.heads})")
        if not 512 <= self.vocab <= 16384:
            raise ValueError(f"vocab is {self.vocab}; it must be 512 to 16384")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; it must be float32 or bfloat16")


def write_tiny_model(directory: Path, recipe: Recipe | None = None, *, force: bool = False) -> Path:
    """Write the model, its configuration and its tokenizer into `directory`, and return it.

    A tiny model that is already there is replaced. `config.json` comes last, so a directory
    that has one is complete.

    Raises:
        FileExistsError: `directory` holds something else and `force` is not set.
        NotADirectoryError: `directory` is a file.
    """
    recipe = recipe or Recipe()
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file; name a directory for the model")
    config = directory / "config.json"
    if not force and directory.is_dir() and any(directory.iterdir()) and not is_tiny_model(config):
        raise FileExistsError(
            f"{directory} holds something that is not a tiny model; name another directory, "
            "or overwrite with --force"
        )
    directory.mkdir(parents=True, exist_ok=True)
    config.unlink(missing_ok=True)
    (directory / "model.safetensors").write_bytes(save(_weights(recipe), {"format": "pt"}))
    tokenizer, tokenizer_config = _tokenizer(recipe.vocab)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    end = recipe.vocab - len(_SPECIAL_TOKENS) + _SPECIAL_TOKENS.index(_END_OF_TURN)
    _write_json(directory / "generation_config.json", {"eos_token_id": end, "do_sample": False})
    _write_json(config, _config(recipe, end))
    return directory


def is_tiny_model(config: Path) -> bool:
    """Whether `config` is the `config.json` of a model that `write_tiny_model` made."""
    try:
        return _MARK in json.loads(config.read_text())
    except (OSError, ValueError):
        return False


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _config(recipe: Recipe, end_token: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": recipe.hidden,
        "intermediate_size": 3 * recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.hidden // recipe.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": CONTEXT_LENGTH,
        "vocab_size": recipe.vocab,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": end_token,
        "torch_dtype": recipe.dtype,
        _MARK: asdict(recipe),
    }


def _weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Checkpoint tensors by their name in Hugging Face's Qwen3."""
    random = np.random.default_rng(recipe.seed)
    dtype = getattr(torch, recipe.dtype)
    hidden, head = recipe.hidden, recipe.hidden // recipe.heads

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        drawn = random.standard_normal((rows, columns), dtype=np.float32)
        return torch.from_numpy(drawn * np.float32(deviation)).to(dtype)

    def linear(rows: int, fan_in: int) -> torch.Tensor:
        return normal(rows, fan_in, 1 / math.sqrt(fan_in))

    def norm(size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.full((size,), scale, dtype=dtype)

    weights = {"model.embed_tokens.weight": normal(recipe.vocab, hidden, 1.0)}
    for layer in range(recipe.layers):
        parts: dict[str, Callable[[], torch.Tensor]] = {
            "input_layernorm": lambda: norm(hidden),
            "self_attn.q_proj": lambda: linear(recipe.heads * head, hidden),
            "self_attn.k_proj": lambda: linear(recipe.kv_heads * head, hidden),
            "self_attn.v_proj": lambda: linear(recipe.kv_heads * head, hidden),
            "self_attn.o_proj": lambda: linear(hidden, recipe.heads * head),
            "self_attn.q_norm": lambda: norm(head, _ATTENTION_SHARPNESS),
            "self_attn.k_norm": lambda: norm(head, _ATTENTION_SHARPNESS),
            "post_attention_layernorm": lambda: norm(hidden),
            "mlp.gate_proj": lambda: linear(3 * hidden, hidden),
            "mlp.up_proj": lambda: linear(3 * hidden, hidden),
            "mlp.down_proj": lambda: linear(hidden, 3 * hidden),
        }
        for name, make in parts.items():
            weights[f"model.layers.{layer}.{name}.weight"] = make()
    weights["model.norm.weight"] = norm(hidden)
    head_weight = linear(recipe.vocab, hidden)
    # A logit of 0 never wins against thousands of unit variance: generated text is printable,
    # streams with every token, and ends only where the request says.
    head_weight[_unprintable(recipe.vocab)] = 0
    weights["lm_head.weight"] = head_weight
    return weights


def _tokens() -> tuple[list[str], Iterator[tuple[str, str]]]:
    """The byte tokens in their order, and the merges that follow, as many as one may want."""
    letters = string.ascii_lowercase
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    merges = itertools.chain(
        itertools.product(space, letters),
        itertools.product(letters, letters),
        ((space + first, second) for first, second in itertools.product(letters, letters)),
        ((first + second, third) for first, second, third in itertools.product(letters, repeat=3)),
    )
    return sorted(pre_tokenizers.ByteLevel.alphabet()), merges


def _unprintable(vocab: int) -> list[int]:
    """Ids that no stream could show: special tokens, and bytes that are no printable ASCII."""
    alphabet, _ = _tokens()
    printable = set(string.ascii_letters + string.digits + string.punctuation)
    special = range(vocab - len(_SPECIAL_TOKENS), vocab)
    return [index for index, token in enumerate(alphabet) if token not in printable] + [*special]


def _tokenizer(vocab: int) -> tuple[Tokenizer, dict[str, Any]]:
    """A byte-level BPE of exactly `vocab` tokens, with its `tokenizer_config.json`.

    The merges are made by rule, not trained: runs of one to three letters, so that any text
    comes back as it went in and every id above the bytes stands for letters.
    """
    alphabet, candidates = _tokens()
    merges = list(itertools.islice(candidates, vocab - len(alphabet) - len(_SPECIAL_TOKENS)))
    names = [*alphabet, *(first + second for first, second in merges)]
    bpe = models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in _SPECIAL_TOKENS]
    )
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "eos_token": _END_OF_TURN,
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
