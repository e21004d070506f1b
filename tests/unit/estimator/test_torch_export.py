"""Real exports of PyTorch modules; skipped if PyTorch is not installed."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tessera.estimator.architectures.resnet import WideResNet, wide_resnet
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.exporting.graphs import export_graph
from tessera.estimator.graph import Graph, Untraceable
from tessera.service.cli import main

pytest.importorskip(
    "torch", reason="needs PyTorch, an extra: pip install 'tessera-scheduler[torch]'"
)

MODULES = "tests.support.torch_modules:"
SMALL = {"hidden": 128, "layers": 4, "heads": 4, "vocabulary": 1000, "sequence": 64}


def export_module(name: str, **arguments: Any) -> Graph:
    return export_graph(MODULES + name, arguments)


def configured_graph(*, flash: bool, **sizes: Any) -> Graph:
    return transformer_graph(Transformer(name="gpt", flash=flash, dtype="f32", **sizes))


def test_gpt_2_is_exported_with_its_published_parameters_and_the_configurations_work() -> None:
    sizes = {"hidden": 768, "layers": 12, "heads": 12, "vocabulary": 50257, "sequence": 1024}
    graph, expected = export_module("decoder", **sizes), configured_graph(flash=True, **sizes)
    assert graph.parameters == expected.parameters == 124_439_808  # Radford et al. 2019: GPT-2
    assert graph.flops.sum() == pytest.approx(expected.flops.sum(), rel=0.001)
    assert graph.touched.sum() == pytest.approx(expected.touched.sum(), rel=0.02)
    assert graph.reduced.sum() == pytest.approx(expected.reduced.sum(), rel=0.001)
    kept, same = (g.kept.sum() + g.boundary.sum() for g in (graph, expected))
    assert kept == pytest.approx(same, rel=0.1)


@pytest.mark.parametrize("fused", [False, True])
def test_handwritten_attention_is_counted_in_full_and_fused_attention_in_part(
    *, fused: bool
) -> None:
    graph, expected = (
        export_module("decoder", fused=int(fused), **SMALL),
        configured_graph(flash=fused, **SMALL),
    )
    assert graph.flops.sum() == pytest.approx(expected.flops.sum(), rel=0.015)
    assert graph.tensor_limit[1] == 4
    assert (graph.reduced[1:-1] == 64 * 128).all()


def test_blocks_consist_of_two_layers_of_one_kind_each_that_pass_one_tensor_on() -> None:
    graph = export_module("decoder", **SMALL)
    assert len(graph) == 1 + 2 * 4 + 1
    assert len(set(graph.kind[2:9])) == 2  # the first attention adds positions
    assert graph.kind[2].startswith("blocks-")
    assert (graph.boundary[:-1] == 64 * 128).all()
    assert graph.boundary[-1] == 0


def test_resnet_50_is_exported_with_its_published_parameters_and_the_configurations_work() -> None:
    graph, expected = export_module("resnet"), wide_resnet(WideResNet(name="resnet"))
    assert graph.parameters == expected.parameters == 25_557_032  # He et al. 2016
    assert graph.flops.sum() == pytest.approx(expected.flops.sum(), rel=0.01)
    assert graph.touched.sum() == pytest.approx(expected.touched.sum(), rel=0.02)
    assert len(graph) == 18  # stem, 16 blocks, classifier
    kept, same = (g.kept.sum() + g.boundary.sum() for g in (graph, expected))
    assert kept == pytest.approx(same, rel=0.1)


def test_heads_of_pytorchs_own_attention_are_divided() -> None:
    graph = export_module("encoder")
    assert graph.tensor_limit[3] == 4
    assert (graph.reduced[2:7] == 16 * 64).all()


def test_the_results_of_a_function_for_one_batch_are_divided_by_its_samples() -> None:
    one, other = export_module("own_batch"), export_module("two")
    assert one.flops == pytest.approx(other.flops)
    assert one.kept == pytest.approx(other.kept)


def test_a_module_that_needs_real_numbers_at_creation_is_moved_and_stays_shared() -> None:
    graph = export_module("not_on_meta")
    assert graph.parameters == 64 + 8 + 8
    assert graph.flops == pytest.approx(export_module("two").flops)


@pytest.mark.parametrize("how", ["checkpointed", "in place"])
def test_calls_and_in_place_changes_do_not_hide_work(how: str) -> None:
    assert (
        export_module("two", how=how).flops.sum()
        == export_module("two").flops.sum()
        == 2 * 128 + 8 + 8
    )


def test_the_data_type_is_the_type_of_the_products() -> None:
    assert export_module("two").dtype == "f32"
    work = export_module("two", how="cast")
    assert work.parameters == 3 * 64 - 64 + 8  # the first bias is not used


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("branches", "only known when the module runs.*branch with torch.where"),
        ("selects", "dynamic shape.*select with a mask"),
        ("conditional", "work depends on data"),
        ("transforms", "_fft_r2c, whose work cannot be counted"),
        ("misfits", "fails while it is exported: RuntimeError"),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.cond
def test_modules_that_cannot_be_exported_are_refused_with_advice(
    how: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Untraceable, match=says):
        export_module("two", how=how)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("tests.unit.nowhere:f", "cannot be imported"),
        (f"{MODULES}nothing", "has no function nothing"),
        ("tests.support.torch_modules", "module:function"),
        (f"{MODULES}no_module", r"returned \(int\); it must return \(module, args\)"),
        (f"{MODULES}fails", "fails: ZeroDivisionError: 2 by nothing"),
    ],
)
def test_a_function_that_returns_no_module_is_refused(target: str, says: str) -> None:
    with pytest.raises(Untraceable, match=says):
        export_graph(target)


def test_unknown_arguments_of_the_function_are_refused() -> None:
    with pytest.raises(Untraceable, match="cannot be called"):
        export_module("two", width=3)


def test_estimates_of_a_module_are_near_those_of_its_configuration(tmp_path: Any) -> None:
    sizes = {"hidden": 1024, "layers": 4, "heads": 16, "vocabulary": 32000, "sequence": 512}
    arguments = [f"--argument={k}={v}" for k, v in sizes.items()]
    options = ["--batch", "64", "--gpu", "a100", "--count", "4", "--dtype", "bf16", "--json"]
    file = tmp_path / "gpt.json"
    file.write_text(json.dumps({"architecture": "transformer", "flash": True, **sizes}))
    times = []
    for model in (["--torch", f"{MODULES}decoder", *arguments], ["--architecture", str(file)]):
        result = CliRunner().invoke(main.app, ["estimate", *model, *options])
        assert result.exit_code == 0, result.output
        cells = json.loads(result.stdout)["cells"]
        times.append({c["pipeline_degree"]: c["iter_time_s"] for c in cells})
    for degree in (1, 2):
        assert times[0][degree] == pytest.approx(times[1][degree], rel=0.05)
