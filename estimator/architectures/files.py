"""Architecture files: our own format (YAML or JSON), or a Hugging Face ``config.json``.

Our own format names an ``architecture`` with the fields of its dataclass. These are Transformer for
``transformer_graph``, MixtureOfExperts for ``moe``, and WideResNet for ``wide_resnet``:

    architecture: transformer
    name: my model              # default: the file's name
    layers: 24
    hidden: 2048
    heads: 16
    sequence: 2048
    vocabulary: 50304
    positions: rotary
    dtype: bf16
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tessera.estimator.architectures.fields import build_config
from tessera.estimator.architectures.huggingface import read_dimensions
from tessera.estimator.architectures.moe import MixtureOfExperts, mixture_graph
from tessera.estimator.architectures.resnet import WideResNet, wide_resnet
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.files.documents import read_document
from tessera.estimator.files.userfiles import read_text
from tessera.estimator.graph import Graph
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.documents import ARCHITECTURE
from tessera.formulation.base.errors import InvalidInput

Architecture = Transformer | MixtureOfExperts | WideResNet

_KINDS: Mapping[str, type[Architecture]] = {
    "transformer": Transformer,
    "moe": MixtureOfExperts,
    "wide_resnet": WideResNet,
}


def load_graph(
    path: Path, *, sequence: int | None = None, dtype: str | None = None, flash: bool = False
) -> Graph:
    """Return the graph of the model in the file. ``sequence`` and ``dtype`` override the file.

    Raises:
        InvalidInput: the file cannot be read, or a field is wrong; names the file and the field.
    """
    text = read_text(path)
    try:
        values = read_values("", text)
        architecture = parse_architecture(
            values, name=_name(path), sequence=sequence, dtype=dtype, flash=flash
        )
    except InvalidInput as error:
        field = f"{path.name}: {error.field}" if error.field else path.name
        raise InvalidInput(field, error.problem) from error
    return architecture_graph(architecture)


def _name(path: Path) -> str:
    """Return the model's name: the name of the file, or of its folder for a ``config.json``."""
    stem = path.resolve().parent.name if path.name == "config.json" else path.stem
    return stem or path.stem


def read_values(
    field: str, text: str, cancelled: Callable[[], bool] = never_cancelled
) -> Mapping[str, Any]:
    """Return the fields in a YAML or JSON text.

    Raises:
        InvalidInput: the text is not such a mapping, or too large; names ``field``.
        DeadlineTooShort: it was cancelled.
    """
    values = read_document(field, text, ARCHITECTURE, cancelled)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InvalidInput(
            field, "must map fields to values, e.g. {architecture: transformer, ...}"
        )
    return values


def parse_architecture(
    values: Mapping[str, Any],
    *,
    name: str,
    sequence: int | None = None,
    dtype: str | None = None,
    flash: bool = False,
) -> Architecture:
    """Return the architecture that the values of a file describe.

    Raises:
        InvalidInput: a field is wrong; names it.
    """
    if "architecture" not in values:
        if "model_type" in values:
            return read_dimensions(values, name=name, sequence=sequence, dtype=dtype, flash=flash)
        raise InvalidInput(
            "architecture",
            f"is missing; it must be one of {', '.join(_KINDS)} (or give a Hugging Face configuration,"
            " which has a model_type)",
        )
    kind = values["architecture"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidInput("architecture", f"unknown {kind!r}; use one of {', '.join(_KINDS)}")
    given = {"name": name} | {k: v for k, v in values.items() if k != "architecture"}
    given |= {} if dtype is None else {"dtype": dtype}
    if _KINDS[kind] is not WideResNet:
        given |= {} if sequence is None else {"sequence": sequence}
        given |= {"flash": True} if flash else {}
    return build_config(_KINDS[kind], given)


def architecture_graph(architecture: Architecture) -> Graph:
    """Return the graph of an architecture of any kind."""
    if isinstance(architecture, WideResNet):
        return wide_resnet(architecture)
    if isinstance(architecture, MixtureOfExperts):
        return mixture_graph(architecture)
    return transformer_graph(architecture)
