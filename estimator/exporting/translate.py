"""Translation of an exported module to a program, with a rule for each ATen operator.

Operators without a rule are refused by name if they may be heavy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from tessera.estimator.exporting import elementwise, layouts, products
from tessera.estimator.exporting.lowering import ProgramBuilder
from tessera.estimator.exporting.nodes import ExportedProgram, Node
from tessera.estimator.graph import Untraceable
from tessera.estimator.programs.program import Program

RULES: Final = layouts.RULES | elementwise.RULES | products.RULES

_HEAVY: Final = re.compile(
    r"::|mm|conv|attention|linalg|cholesky|solve|lstm|gru|rnn|cdist|fft|ctc|bilinear$|sparse|fbgemm|mkldnn|cudnn|miopen"
)
"""Operators without a rule whose work is, or may be, more than one operation per result."""


def program_of(name: str, exported: ExportedProgram, batch: Sequence[int]) -> Program:
    """Return the program of an exported module. ``batch`` are inputs that grow with the samples.

    The values kept for the backward pass are those that autograd saves (PyTorch's
    ``derivatives.yaml``). The fusion into kernels later removes those that are computed again.

    Raises:
        Untraceable: the work of an operator cannot be counted, there is nothing to train, or there
            is no floating-point result.
    """
    lowering = ProgramBuilder.of(exported, batch)
    if not lowering.trained:
        raise Untraceable(f"{name}: no parameter is floating-point; there is nothing to train")
    for node in exported.nodes:
        if any(v >= 0 for v in node.writes):
            _translate(name, lowering, node)
    loss = lowering.scalar(exported.results)
    if loss is None:
        raise Untraceable(
            f"{name}: forward returns no floating-point tensor; return the loss, or the logits"
        )
    lowering.program.loss = loss
    lowering.program.residuals = list(lowering.saved)
    return lowering.program


def _translate(name: str, lowering: ProgramBuilder, node: Node) -> None:
    rule = RULES.get(node.target)
    if rule is not None:
        rule(lowering, node)
    elif _HEAVY.search(node.target) is None or node.pointwise:
        elementwise.elementwise_rule(lowering, node)
    else:
        where = f"{node.path} calls" if node.path else "the module calls"
        raise Untraceable(
            f"{name}: {where} {node.target}, whose work cannot be counted; export"
            " a version in plain PyTorch operators, or describe the model by a configuration"
        )
