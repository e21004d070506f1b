"""The compiling process, which reads a JSON request and answers in the last line of its output."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from tessera.estimator.compiling import cache
from tessera.estimator.compiling.collectives import collectives_of
from tessera.estimator.compiling.compile import CompileRequest
from tessera.estimator.compiling.compiled import CompiledStep, Memory, Uncompilable, to_json
from tessera.estimator.compiling.costs import further_turns
from tessera.estimator.compiling.hlo import read_module
from tessera.estimator.compiling.sharding import lowered_step
from tessera.estimator.tracing.step import load_step
from tessera.formulation.errors import TesseraError


def compiled_step(request: CompileRequest, folder: Path) -> CompiledStep:
    """Return the step of a request, from the cache if it was compiled before.

    Raises:
        TesseraError: the step cannot be compiled; the message says why.
    """
    step = load_step(request.target, request.arguments)
    versions = {"jax": jax.__version__, "jaxlib": version("jaxlib")}
    lowered = lowered_step(step, request.dp, request.tp, zero=request.zero)
    facts = (request.dp, request.tp, request.zero, tuple(versions.items()))
    key = cache.key_of(lowered.as_text(), facts)
    if (cached := cache.look_up_step(folder, key)) is not None:
        return cached
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise Uncompilable(
            f"{step.name} for {request.dp} x {request.tp} devices: {reason}"
        ) from error
    module = read_module(executable.as_text())
    flops, moved = further_turns(module)
    cost = executable.cost_analysis()
    made = CompiledStep(
        name=step.name,
        dp=request.dp,
        tp=request.tp,
        collectives=collectives_of(module, request.dp * request.tp),
        flops=float(cost["flops"]) + flops,
        bytes=float(cost["bytes accessed"]) + moved,
        memory=_memory(executable.memory_analysis()),
        versions=versions,
    )
    cache.store_step(folder, key, made)
    return made


def _memory(stats: Any) -> Memory:
    return Memory(
        arguments=float(stats.argument_size_in_bytes),
        outputs=float(stats.output_size_in_bytes),
        aliased=float(stats.alias_size_in_bytes),
        temporaries=float(stats.temp_size_in_bytes),
    )


def main() -> None:
    """Answer the request on the standard input."""
    given = json.load(sys.stdin)
    folder = Path(given.pop("folder"))
    answer: dict[str, Any]
    try:
        made = compiled_step(CompileRequest(**given), folder)
        answer = {"compiled": to_json(made), "cached": made.cached}
    except TesseraError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
