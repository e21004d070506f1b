"""Graphs of dense transformers: decoders, encoders, encoder-decoders and image classifiers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tessera.estimator.architectures.fields import check_sizes
from tessera.estimator.architectures.parts import (
    Activation,
    Attention,
    Bias,
    Part,
    attention_part,
    feed_forward_part,
    linear_part,
    loss_part,
    norm_part,
    residual_part,
)
from tessera.estimator.graph import DTYPE_BYTES, Graph, Layer, graph_of
from tessera.formulation.base.errors import InvalidInput

MAX_STACK_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Dimensions of a transformer.

    With ``decoder_layers``, the first ``layers`` are an encoder (T5). With ``image``, it reads
    patches instead of tokens (ViT), and ``sequence`` is ignored.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int = 0
    """Tokens of a sample, or of its encoder if there are two stacks."""
    vocabulary: int = 0
    kv_heads: int = 0
    """Number of key and value heads. If it is 0, it is ``heads``."""
    head_dim: int = 0
    """Width of a head. If it is 0, it is ``hidden / heads``."""
    intermediate: int = 0
    """Width of the feed-forward net. If it is 0, it is four times ``hidden``."""
    activation: Activation = "gelu"
    gated: bool = False
    causal: bool = True
    norm: Literal["layer", "rms"] = "layer"
    norm_first: bool = True
    """Whether blocks normalise before attention and feed-forward, and the model once at the end. If
    it is false, they normalise afterwards, and the model also after the embeddings."""
    bias: bool = True
    """Whether linear layers have a bias."""
    qkv_bias: bool | None = None
    """Bias of queries, keys and values. If it is None, it is ``bias``."""
    attention_bias: bool | None = None
    """Bias of attention's output projection. If it is None, it is ``bias``."""
    positions: Literal["learned", "rotary", "relative", "none"] = "learned"
    max_positions: int = 0
    """Rows of the learned table. If it is 0, it is ``sequence``."""
    position_buckets: int = 32
    """Buckets of relative positions, for each head and stack (T5)."""
    token_types: int = 0
    head: Literal["lm", "mlm", "pretraining", "classes"] = "lm"
    """``mlm`` has a transform before the output projection (BERT). ``pretraining`` adds the
    next-sentence classifier."""
    tied: bool = True
    """Whether the output projection is the input embedding."""
    head_bias: bool = False
    classes: int = 0
    pooler: bool = False
    """Whether the first token passes through another product before the classes (BERT)."""
    decoder_layers: int = 0
    decoder_sequence: int = 0
    """Tokens of the decoder. If it is 0, it is ``sequence``."""
    image: int = 0
    """Pixels of a side of the image. If it is 0, samples are tokens."""
    patch: int = 16
    channels: int = 3
    flash: bool = False
    """Whether attention is fused. Fused attention stores no scores, and computes only half of the
    causal ones."""
    dropout: bool = False
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        """Refuse impossible dimensions."""
        check_dimensions(self)

    @property
    def tokens(self) -> int:
        """Return the tokens of a sample: patches and a class token, or the sequence."""
        return (self.image // self.patch) ** 2 + 1 if self.image else self.sequence

    @property
    def target_tokens(self) -> int:
        """Return the tokens of a sample in the last stack."""
        return (self.decoder_sequence or self.sequence) if self.decoder_layers else self.tokens

    @property
    def inner(self) -> int:
        """Return the width of the feed-forward net."""
        return self.intermediate or 4 * self.hidden

    def attention(self, *, causal: bool) -> Attention:
        """Return the attention of a block."""
        return Attention(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or self.hidden // self.heads,
            causal=causal,
            flash=self.flash,
            rotary=self.positions == "rotary",
            dropout=self.dropout,
            dtype=self.dtype,
            in_bias=self.bias if self.qkv_bias is None else self.qkv_bias,
            out_bias=self.bias if self.attention_bias is None else self.attention_bias,
        )


def check_dimensions(c: Transformer) -> None:
    """Refuse impossible dimensions.

    Raises:
        InvalidInput: a dimension is impossible; names the field.
    """
    check_sizes(c)
    for field in ("hidden", "heads"):
        if getattr(c, field) < 1:
            raise InvalidInput(field, "must be at least 1")
    if not 1 <= c.layers <= MAX_STACK_LAYERS or not 0 <= c.decoder_layers <= MAX_STACK_LAYERS:
        wrong = "decoder_layers" if 1 <= c.layers <= MAX_STACK_LAYERS else "layers"
        least = 1 if wrong == "layers" else 0
        raise InvalidInput(wrong, f"must be from {least} to {MAX_STACK_LAYERS:,}")
    for field in (
        "sequence",
        "vocabulary",
        "kv_heads",
        "head_dim",
        "intermediate",
        "max_positions",
        "position_buckets",
        "token_types",
        "classes",
        "decoder_sequence",
        "image",
    ):
        if getattr(c, field) < 0:
            raise InvalidInput(field, "must not be negative")
    if c.dtype not in DTYPE_BYTES:
        raise InvalidInput("dtype", f"unknown {c.dtype!r}; use one of {', '.join(DTYPE_BYTES)}")
    if not c.head_dim and c.hidden % c.heads:
        raise InvalidInput("heads", f"must divide hidden ({c.hidden}) unless head_dim is given")
    if c.kv_heads and c.heads % c.kv_heads:
        raise InvalidInput("kv_heads", f"must divide heads ({c.heads})")
    _check_ends(c)


def _check_ends(c: Transformer) -> None:
    if c.image:
        if c.patch < 1 or c.image % c.patch:
            raise InvalidInput("patch", f"must divide image ({c.image})")
        if c.channels < 1:
            raise InvalidInput("channels", "must be at least 1")
        if c.vocabulary or c.decoder_layers or c.head != "classes":
            raise InvalidInput("image", "needs head: classes; remove vocabulary and decoder_layers")
    elif c.sequence < 1 or c.vocabulary < 1:
        field = "sequence" if c.sequence < 1 else "vocabulary"
        raise InvalidInput(field, "must be at least 1 unless image is given")
    if c.head == "classes" and c.classes < 1:
        raise InvalidInput("classes", "must be at least 1 with head: classes")
    if c.positions == "learned" and 0 < c.max_positions < c.tokens:
        raise InvalidInput("sequence", f"must be at most max_positions ({c.max_positions})")


def transformer_graph(c: Transformer) -> Graph:
    """Return the graph: embedding, one layer per block, head.

    The blocks of a decoder after an encoder hand the encoder's output on with their own, because
    each block reads it.
    """
    blocks = stack_layers(c, [block_layer(c, causal=c.causal and not c.decoder_layers)] * c.layers)
    layers = [embedding_layer(c), *blocks]
    if c.decoder_layers:
        decoder = stack_layers(c, [_decoder_layer(c)] * c.decoder_layers)
        layers += [_target_embedding(c), *decoder]
    return graph_of(c.name, c.dtype, [*layers, head_layer(c)])


def stack_layers(c: Transformer, blocks: list[Layer]) -> list[Layer]:
    """Return the blocks. With relative positions, the first block holds the stack's table (T5)."""
    if c.positions != "relative":
        return blocks
    first = blocks[0]
    rows = first.shared_weights + c.position_buckets * c.heads
    held = replace(first, shared_weights=rows, kind=f"{first.kind} buckets{c.position_buckets}")
    return [held, *blocks[1:]]


def block_part(
    c: Transformer, *, causal: bool, cross: bool = False, feed: Part | None = None
) -> Part:
    """Return one block. If ``feed`` is given, it replaces the feed-forward net.

    Kept and shared amounts do not depend on the order of normalisation and addition. Without
    dropout, the term 5 a s^2 of Korthikanti et al. 2022, eq. (1), becomes 2 a s^2.
    """
    tokens = c.target_tokens if cross else c.tokens
    part = _sublayer(
        c, tokens, attention_part(c.attention(causal=causal), tokens, tokens), last=False
    )
    if cross:
        other = attention_part(c.attention(causal=False), tokens, c.tokens, cross=True)
        part += _sublayer(c, tokens, other, last=False)
    inner = feed or feed_forward_part(
        tokens, c.hidden, c.inner, activation=c.activation, gated=c.gated, biased=c.bias
    )
    return part + _sublayer(c, tokens, inner, last=True)


def _sublayer(c: Transformer, tokens: float, part: Part, *, last: bool) -> Part:
    """Return a sublayer with its normalisation and residual.

    The result of the last one is the boundary of the block.
    """
    around = norm_part(tokens, c.hidden, biased=c.norm == "layer")
    return (
        part
        + around
        + residual_part(tokens, c.hidden, dropped=c.dropout, keeps=not last, dtype=c.dtype)
    )


def block_layer(c: Transformer, *, causal: bool) -> Layer:
    """Return a block as a layer."""
    part = block_part(c, causal=causal)
    return part.layer(
        f"{'decoder' if causal else 'encoder'} block {shape_name(c)} s{c.tokens}",
        boundary=c.tokens * c.hidden,
        tensor_limit=tensor_limit(c),
        heads=c.kv_heads or c.heads,
    )


def _decoder_layer(c: Transformer) -> Layer:
    return block_part(c, causal=True, cross=True).layer(
        f"cross block {shape_name(c)} s{c.target_tokens}x{c.tokens}",
        boundary=(c.target_tokens + c.tokens) * c.hidden,
        tensor_limit=tensor_limit(c),
        heads=c.kv_heads or c.heads,
    )


def tensor_limit(c: Transformer) -> int:
    """Return the largest tensor degree that divides the key and value heads."""
    heads = c.kv_heads or c.heads
    return heads & -heads  # degrees are powers of two


def shape_name(c: Transformer) -> str:
    """Return a short name of the dimensions of a block. Equal names mean equal operators."""
    a = c.attention(causal=True)
    switches = (
        c.activation,
        "gated" * c.gated,
        c.norm,
        "" if c.norm_first else "post",
        "bias" * c.bias,
        "qkv-bias" * a.in_bias,
        "out-bias" * a.out_bias,
        "rotary" * a.rotary,
        "flash" * a.flash,
        "dropout" * a.dropout,
    )
    dimensions = f"h{c.hidden} a{a.heads}/{a.kv_heads}x{a.head_dim} f{c.inner}"
    return " ".join((dimensions, *filter(None, switches)))


def embedding_layer(c: Transformer) -> Layer:
    """Return the input layer. A look-up has no products, and tied weights are counted in the head."""
    size = c.tokens * c.hidden
    if c.image:
        pixels = c.patch**2 * c.channels
        part = linear_part(c.tokens - 1, pixels, c.hidden, bias="whole", keeps=False)
        part += Part(kept=(c.tokens - 1) * pixels, shared_weights=c.hidden)  # the class token
        kind, limit = f"patches {c.image}/{c.patch}x{c.channels}", float(c.hidden)
    else:
        # The table is split by vocabulary (Megatron-LM). The backward pass needs no all-reduce, so
        # half of one counts for each pass.
        part = Part(touched=2 * size, kernels=1, reduced=size / 2)
        part += Part(weights=0.0 if c.tied and _projects(c) else c.vocabulary * c.hidden)
        kind, limit = f"embedding v{c.vocabulary}", float(c.vocabulary)
    part += _places(c)
    return part.layer(
        f"{kind} h{c.hidden} s{c.tokens} {c.positions}{c.max_positions}+{c.token_types}"
        f"{'' if c.norm_first else ' norm'}{' tied' * c.tied}",
        boundary=size,
        tensor_limit=limit,
    )


def _places(c: Transformer) -> Part:
    """Return positions, token types and, if blocks normalise last, the norm of embeddings."""
    size = c.tokens * c.hidden
    rows = (c.max_positions or c.tokens) if c.positions == "learned" else 0
    tables = bool(rows) + bool(c.token_types)
    part = Part(
        touched=(tables and 2 + tables) * size,
        kernels=float(tables > 0),
        shared_weights=(rows + c.token_types) * c.hidden,
    )
    if not c.norm_first:
        after = norm_part(c.tokens, c.hidden, biased=c.norm == "layer")
        part += Part(
            touched=after.touched,
            kernels=1,
            shared_weights=after.shared_weights,
            kept=size,
            unsplit=size,
        )
    return part


def _projects(c: Transformer) -> bool:
    return c.head != "classes"


def _target_embedding(c: Transformer) -> Layer:
    """Return the end of the encoder and the look-up of the decoder's tokens in the same table."""
    size = c.target_tokens * c.hidden
    part = Part(touched=2 * size, kernels=1, reduced=size / 2)
    part += norm_part(
        c.tokens, c.hidden, biased=c.norm == "layer"
    )  # the input of every decoder block
    boundary = size + c.tokens * c.hidden
    kept = max(0.0, part.kept - c.tokens * c.hidden)  # the normalised output is in the boundary
    part = Part(
        touched=part.touched,
        kernels=part.kernels,
        shared_weights=part.shared_weights,
        reduced=part.reduced,
        kept=kept,
        unsplit=kept,
    )
    return part.layer(
        f"target embedding v{c.vocabulary} h{c.hidden} s{c.target_tokens}+{c.tokens}",
        boundary=boundary,
        tensor_limit=float(c.vocabulary),
    )


def head_layer(c: Transformer) -> Layer:
    """Return the last normalisation, the output projection and the loss."""
    tokens, name = c.target_tokens, f"head {c.head} h{c.hidden} s{c.target_tokens}"
    part = norm_part(tokens, c.hidden, biased=c.norm == "layer") if c.norm_first else Part()
    if c.head == "classes":
        part += _first_token(c, c.classes, pooled=c.pooler)
        kind, limit = f"{name} c{c.classes}", float(c.hidden)
    else:
        if c.head in ("mlm", "pretraining"):
            part += _transform(c, tokens)
        bias: Bias = "split" if c.head_bias else "none"
        part += linear_part(tokens, c.hidden, c.vocabulary, bias=bias, keeps=False)
        part += loss_part(tokens, c.vocabulary, c.dtype)
        # The forward pass needs no all-reduce, and the backward pass one, of the input's gradient.
        # Half of one therefore counts for each pass.
        part += Part(reduced=tokens * c.hidden / 2)
        kind, limit = f"{name} v{c.vocabulary}", float(c.vocabulary)
    if c.head == "pretraining":
        part += _first_token(c, 2, pooled=True)
    switches = f"{' norm' * c.norm_first}{' bias' * c.head_bias}{' pooler' * c.pooler}"
    return part.layer(kind + switches, boundary=0.0, tensor_limit=limit)


def _first_token(c: Transformer, classes: int, *, pooled: bool) -> Part:
    """Return a classifier of the first token."""
    part = linear_part(1, c.hidden, c.hidden, bias="whole", keeps=True) if pooled else Part()
    return (
        part
        + linear_part(1, c.hidden, classes, bias="whole", keeps=True)
        + loss_part(1, classes, c.dtype)
    )


def _transform(c: Transformer, tokens: int) -> Part:
    """Return the product, activation and normalisation before BERT's output projection."""
    size = tokens * c.hidden
    part = linear_part(tokens, c.hidden, c.hidden, bias="whole", keeps=True)
    part += Part(touched=2 * size, kernels=1, kept=size, unsplit=2 * size)
    return part + norm_part(tokens, c.hidden, biased=c.norm == "layer")
