"""What another provider than the CPU's computes is compared with the CPU, or it is not used: OpenVINO's plugin."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.agreement import VerifyOptions, verify
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.errors import ModelFileError, OptionError, PassError, ProviderError, VerificationError
from onnxtool.guarded import GuardedChild, trusted
from onnxtool.infer import InferOptions, run_texts
from onnxtool.model_file import ModelFile
from onnxtool.optimize.quantization import candidates
from onnxtool.optimize.quantization.candidates import Judgement
from onnxtool.optimize.report import OptimizeReport
from onnxtool.optimize.run import plan_optimization
from onnxtool.runtime import compiled as compiled_files
from onnxtool.runtime import providers, session
from onnxtool.runtime.difference import Tolerance
from onnxtool.runtime.providers import ExecutionProvider, ProviderOptions, has_bf16
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import find_provider, open_session, tolerance_of
from tests.cli.entry_point import json_of, run_onnxtool
from tests.graphs import save_text
from tests.packages import need
from tests.workshop import WORDS, Workshop

PACKAGE = "onnxruntime_ep_openvino"
_SOURCE = Path(__file__).with_name("any_vendor.c")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OpenVINO's plugin, with devices on processors of any vendor."""
    plugin = Path(need(PACKAGE).get_library_path())
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed")
    folder = tmp_path_factory.mktemp("plugin")
    for file in plugin.parent.glob("*.so*"):
        (folder / file.name).symlink_to(file)
    # A library of its own: the installed one keeps the API that another test may have given it.
    own = folder / "plugin.so"
    shutil.copy(plugin, own)
    path = folder / "any_vendor.so"
    command = ["cc", "-shared", "-fPIC", "-O1", f'-DPLUGIN="{own}"', "-o", str(path), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def openvino(library: Path) -> str:
    """Its text."""
    return f"openvino?library={library}"


@pytest.fixture(scope="session")
def fused(trained: Path) -> Path:
    """A trained encoder, fused for the CPU."""
    return trained.with_name("fused.onnx")


@pytest.fixture(scope="session")
def tiny(workshop: Workshop) -> Path:
    """An encoder of random weights, of 32 numbers a token: compiled, quantized and compared in moments."""
    return workshop.exported("tiny-encoder", exporter="torchscript")


def _feeds(opened: Session) -> dict[str, NDArray[np.int64]]:
    ids = np.random.default_rng(0).integers(200, WORDS, (3, 17))
    mask = np.ones_like(ids)
    mask[1, 9:] = 0
    every = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {name: every[name] for name in opened.input_names}


def _save(path: Path, body: str, weights: Mapping[str, NDArray[Any]], width: int) -> Path:
    """Write a graph from `x` to `y`, both [B, 6, width]."""
    return save_text(path, f"g (float[b, 6, {width}] x) => (float[b, 6, {width}] y) {{ {body} }}", weights, 17)


def _unscaled(path: Path) -> Path:
    """An Attention without the usual scale, as T5's and GPT-Neo's, which OpenVINO scales all the same."""
    draw = np.random.default_rng(0)
    weights = {"w": draw.normal(size=(8, 24)).astype(np.float32), "b": np.zeros(24, np.float32)}
    return _save(path, "y = com.microsoft.Attention <num_heads=2, scale=1.0> (x, w, b)", weights, 8)


def _with_fast_gelu(path: Path) -> Path:
    """A product, which OpenVINO takes, and a FastGelu, which it does not."""
    body = "h = MatMul(x, w) [gelu] y = com.microsoft.FastGelu(h)"
    return _save(path, body, {"w": np.eye(64, dtype=np.float32)}, 64)


def test_a_provider_gives_the_cpus_vectors_in_float32_although_its_default_is_less(fused: Path, openvino: str) -> None:
    """The precision is set, not left to it: half precision would be off by more than 1e-4 of the largest value."""
    cpu, other = open_session(fused, provider="cpu"), open_session(fused, provider=openvino)
    assert other.provider == openvino
    assert not other.notes
    for name, wanted in cpu.run(_feeds(cpu)).items():
        np.testing.assert_allclose(other.run(_feeds(cpu))[name], wanted, atol=1e-5 * np.abs(wanted).max())


def test_a_provider_that_computes_something_else_is_refused_with_the_figures(tmp_path: Path, openvino: str) -> None:
    """OpenVINO loads an Attention with a scale of its own without a word."""
    path = _unscaled(tmp_path / "m.onnx")
    with pytest.raises(ProviderError, match="differs from the CPU's result in .* max_abs_error") as caught:
        open_session(path, provider=openvino)
    assert "--provider cpu" in caught.value.hint


def test_verify_says_how_far_a_provider_is_off(tmp_path: Path, fused: Path, openvino: str) -> None:
    """It compares instead of refusing: the first file there, the second on the CPU."""
    wrong = _unscaled(tmp_path / "m.onnx")
    assert not verify(wrong, wrong, VerifyOptions(provider=openvino)).passed
    found = verify(fused, fused, VerifyOptions(provider=openvino))
    assert found.passed
    assert found.provider == "openvino"


def spoil(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], Any], weights: str = "float32") -> None:
    """Plant a fault in every provider's outputs but the CPU's, of files with such weights.

    They have to be compared in this process.
    """
    own = Session.run

    def spoiled(opened: Session, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        outputs = own(opened, feeds)
        if opened.provider == "cpu" or weights not in {one.dtype for one in opened.model.structure.initializers}:
            return outputs
        return {name: fault(array).astype(np.float32) for name, array in outputs.items()}

    monkeypatch.setattr(Session, "run", spoiled)


def test_a_provider_that_rounds_to_half_precision_is_refused(
    monkeypatch: pytest.MonkeyPatch, fused: Path, openvino: str
) -> None:
    """Though the graph is right."""
    spoil(monkeypatch, lambda array: array.astype(np.float16))
    with trusted(), pytest.raises(ProviderError, match="differs from the CPU's result"):
        open_session(fused, provider=openvino)


def test_a_node_that_falls_back_is_an_error_that_names_it(tmp_path: Path, openvino: str) -> None:
    """Allowed, it is said with its share of the time."""
    path = _with_fast_gelu(tmp_path / "m.onnx")
    with pytest.raises(ProviderError, match=r"does not take 1 nodes? .*FastGelu gelu") as caught:
        open_session(path, provider=openvino)
    assert "--provider cpu" in caught.value.hint
    (note,) = open_session(path, provider=f"{openvino}&allow_fallback=1").notes
    assert note.startswith("1 nodes run on the CPU, ")
    assert note.endswith("% of the time: FastGelu gelu")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("openvino:GPU?library={library}", "it has no device 'GPU', only CPU"),
        ("openvino?library={library}.missing", "does not exist"),
        ("openvino?library={text}", "its library cannot be loaded"),
        ("webgpu?library={library}", "lists no device of WebGpuExecutionProvider"),
        ("openvino?library={library}&NO_SUCH=1", "NO_SUCH"),
        ("coreml", "was built without it"),
        ("mlx", "pip install onnxruntime-ep-mlx"),
    ],
)
def test_what_cannot_run_is_one_error(tmp_path: Path, fused: Path, library: Path, text: str, reason: str) -> None:
    """A device that is not there, a library that is none, an option that the provider does not know."""
    no_library = tmp_path / "library.so"
    no_library.write_text("text")
    with pytest.raises(ProviderError, match=reason):
        open_session(fused, provider=text.format(library=library, text=no_library))


def test_a_provider_that_ends_the_process_is_one_error(
    monkeypatch: pytest.MonkeyPatch, fused: Path, openvino: str
) -> None:
    """Compiling is tried in another process first."""
    monkeypatch.setattr(session, "GuardedChild", lambda *_arguments: GuardedChild(f"{__name__}:die"))
    with pytest.raises(ProviderError, match="makes a library give up \\(SIGABRT\\)"):
        open_session(fused, provider=openvino)


def die(_argument: object) -> None:
    """End the process, as a compiler does that fails an assertion."""
    os.abort()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider": "openvino", "provider_options": ["NUM_STREAMS"]}, "'NUM_STREAMS' is not KEY=VALUE"),
        ({"provider": "cpu", "provider_options": ["A=1"]}, "an option was given for the provider cpu"),
        ({"provider_library": "x.so"}, "a library was given for the provider auto"),
        ({"provider": "cuda", "provider_library": "x.so"}, "a library was given for the provider cuda"),
        ({"provider": "cuda", "allow_fallback": True}, "--allow_fallback was given for the provider cuda"),
        ({"provider": "cpu:0"}, "a device was given for the provider cpu"),
        ({"provider": "openvin"}, "Did you mean 'openvino'"),
        ({"provider": "openvino?A"}, "'A' is not KEY=VALUE"),
        ({"provider": "openvino?allow_fallback=2"}, "takes 0 or 1"),
    ],
)
def test_details_of_a_provider_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    """Nothing is left out in silence."""
    with pytest.raises(OptionError, match=message):
        InferOptions("m.onnx", texts=("a",), **options)


def test_details_of_a_provider_become_its_text_and_back(tmp_path: Path) -> None:
    """So that they reach workers, reports and other machines as one value."""
    given = InferOptions(
        "m.onnx",
        provider="openvino:CPU?B=2",
        provider_options=["A=x=y & z"],
        provider_library=tmp_path / "a b.so",
        allow_fallback=True,
    )
    found = ExecutionProvider.parse(given.provider)
    assert found == ExecutionProvider(
        "openvino", "CPU", (("A", "x=y & z"), ("B", "2")), str(tmp_path / "a b.so"), allow_fallback=True
    )
    assert str(found) == given.provider
    assert isinstance(given, ProviderOptions)
    assert replace(given) == given


def test_bf16_is_verified_on_the_provider_and_is_what_it_computes_in_later(
    tmp_path: Path, trained: Path, library: Path, openvino: str
) -> None:
    """The weights stay float32: on the CPU the file computes in it, and says so. Emulated, it is refused."""
    output = tmp_path / "m.onnx"
    options = OptimizeOptions(
        trained, output=output, provider="openvino", provider_library=library, precision="bf16", timing=False
    )
    if not has_bf16(ExecutionProvider.parse(openvino)):
        with pytest.raises(ProviderError, match="would only emulate bfloat16"):
            optimize_model(options)
        return
    report = optimize_model(options)
    verification = report.verification
    assert verification is not None
    assert (verification.provider, report.provider, report.precision) == ("openvino", "openvino", "bf16")
    assert verification.max_abs_error > 1e-4  # it did multiply in bfloat16
    (step,) = [step for step in ModelFile.open(output).steps if step["step"] == "optimize"]
    assert (step["provider"], step["precision"], step["verified_on"]) == ("openvino", "bf16", "openvino")
    assert str(library) not in json.dumps(step)
    assert find_provider(ModelFile.open(output), openvino)[0].precision == "bf16"
    on_cpu = open_session(output, provider="cpu")
    assert on_cpu.notes == ("the file is for bfloat16, and cpu multiplies in float32 here",)
    original = open_session(trained, provider="cpu")
    feeds = _feeds(original)
    for name, wanted in original.run(feeds).items():
        np.testing.assert_allclose(on_cpu.run(feeds)[name], wanted, atol=1e-5)
    with pytest.raises(VerificationError, match="cosine") as caught:
        optimize_model(replace(options, max_error=1e-9, force=True))
    assert "--max_error" in caught.value.hint


def test_a_pass_that_the_provider_misreads_is_left_out(tmp_path: Path, openvino: str, library: Path) -> None:
    """The same graph without FastGelu, which the pass `gelu` writes for this form, is taken whole."""
    draw = np.random.default_rng(0)
    numbers = {"half": 0.5, "one": 1.0, "a": 0.044715, "c": 0.7978845608, "three": 3.0}
    weights = {name: np.array(number, np.float32) for name, number in numbers.items()}
    weights["w"] = draw.normal(size=(16, 16)).astype(np.float32)
    body = """
        h = MatMul(x, w) h3 = Pow(h, three) ah3 = Mul(h3, a) sum = Add(h, ah3) inner = Mul(sum, c)
        t = Tanh(inner) t1 = Add(t, one) hh = Mul(h, half) y = Mul(hh, t1)
    """
    path = _save(tmp_path / "m.onnx", body, weights, 16)
    for_cpu = optimize_model(OptimizeOptions(path, output=tmp_path / "cpu.onnx", timing=False))
    assert "com.microsoft::FastGelu" in for_cpu.after.ops
    report = optimize_model(
        OptimizeOptions(path, output=tmp_path / "o.onnx", provider="openvino", provider_library=library, timing=False)
    )
    assert [result.name for result in report.passes if result.left_out] == ["gelu"]
    assert "com.microsoft::FastGelu" not in report.after.ops
    open_session(tmp_path / "o.onnx", provider=openvino)
    words = ("--provider", "openvino", "--provider_library", str(library), "--allow_fallback", "--output", "f.onnx")
    done = run_onnxtool(tmp_path, "optimize", path, *words)
    assert re.search(r"note: 1 nodes run on the CPU, \d+% of the time: FastGelu", done.stdout), (
        done.stdout + done.stderr
    )
    assert "not timed" not in done.stdout


def test_a_provider_that_cannot_verify_is_refused_first(tiny: Path, tmp_path: Path, library: Path) -> None:
    """A dry run refuses it as well; without a verification, the file may be written anywhere."""
    provider = f"openvino:NPU?library={library}"
    options = OptimizeOptions(tiny, output=tmp_path / "m.onnx", provider=provider)
    for step in (plan_optimization, optimize_model):
        with pytest.raises(ProviderError, match="openvino:NPU cannot run here"):
            step(options)
    report = optimize_model(replace(options, verify=False))
    assert report.not_timed == "it has no device 'NPU', only CPU"


def test_int8_holds_its_bound_on_the_provider(tmp_path: Path, tiny: Path, library: Path) -> None:
    """The error in the report is the one measured there."""
    output = tmp_path / "m.onnx"
    options = OptimizeOptions(
        tiny, output=output, provider="openvino", provider_library=library, precision="int8", timing=False
    )
    report = optimize_model(options)
    assert report.quantization is not None
    assert 0.0 < report.quantization.error <= 0.01
    on_cpu = optimize_model(replace(options, provider="cpu", provider_library=None, force=True))
    assert on_cpu.quantization is not None
    assert report.quantization.error != on_cpu.quantization.error
    # What is not quantized may be in bfloat16; activations then round to other integers, which is more than its error.
    asked = ExecutionProvider.parse(f"openvino?INFERENCE_PRECISION_HINT=bf16&library={library}")
    assert tolerance_of(ModelFile.open(output), asked) == Tolerance(1e-2, 0.1, 0.99, rounding=2.0**-7)


def test_int8_that_breaks_its_bound_on_the_provider_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path, library: Path
) -> None:
    """Though it holds on the CPU: 18 % more and less of every other number are 1 - cosine 0.016."""
    spoil(monkeypatch, lambda array: array * np.resize([0.82, 1.18], array.shape[-1]), "int8")
    options = OptimizeOptions(
        tiny, output=tmp_path / "m.onnx", provider="openvino", provider_library=library, precision="int8", timing=False
    )
    with trusted(), pytest.raises(PassError, match="the error on openvino is .*, above 0.01, which holds on the CPU"):
        optimize_model(options)


def test_auto_is_the_provider_of_the_file_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fused: Path
) -> None:
    """A stamp decides for auto alone."""
    model = ModelFile.open(fused)
    monkeypatch.setattr(session, "made_for", lambda _model: {"provider": "openvino", "precision": "fp32"})
    monkeypatch.setattr(providers, "provider_problem", lambda *_place: "")
    monkeypatch.setattr(session, "provider_problem", lambda *_place: "")
    assert find_provider(model, "auto")[0].name == "openvino"
    assert find_provider(model, "cpu") == (ExecutionProvider("cpu"), ())
    monkeypatch.setattr(session, "provider_problem", lambda *_place: "it is gone")
    chosen, notes = find_provider(model, "auto")
    assert chosen.name == "cpu"
    assert notes == ("the file is for openvino, which cannot run here: it is gone",)


@pytest.mark.usefixtures("brief_timings")
def test_auto_chooses_among_providers_and_the_file_is_used_where_it_was_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path, library: Path
) -> None:
    """Every command takes the provider and its precision from the stamp, and a judge runs candidates there as well."""
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text(f"def get_library_path(): return {str(library)!r}")
    monkeypatch.syspath_prepend(tmp_path)  # for the processes that compare as well
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    providers.plugin_devices.cache_clear()
    few = {"cpu": (("fp32", ""),), "openvino": (("fp32", ""), ("bf16", ""))}
    monkeypatch.setattr(candidates, "CANDIDATES", few)
    judged: list[str] = []

    def judge(path: Path) -> Judgement:
        judged.append(open_session(path, provider="auto").provider)
        return Judgement({"ndcg@10": 0.5}, "" if judged[-1] == "openvino" else "too low")

    output = tmp_path / "m.onnx"
    options = OptimizeOptions(tiny, output=output, provider="auto", precision="auto", timing=False)
    report = optimize_model(options, judge=judge)
    assert [(one.provider, one.precision) for one in report.candidates] == [
        *(("cpu", "fp32"), ("openvino", "fp32"), ("openvino", "bf16"))
    ]
    (chosen,) = [one for one in report.candidates if one.chosen]
    assert (report.provider, report.precision) == (chosen.provider, chosen.precision)
    assert chosen.provider == "openvino"
    assert "openvino" in judged
    assert report.verification is not None
    assert report.verification.provider == "openvino"
    monkeypatch.setattr(session, "prove_elsewhere", None)  # the stamp says that it was verified
    assert run_texts(InferOptions(output, model_name=tiny.with_suffix(""), texts=("a",))).provider == "openvino"
    changed = output.with_name("changed.onnx")  # by a tool that keeps metadata
    proto = onnx.load(output)
    proto.graph.node[0].name = "another"
    onnx.save(proto, changed)
    with pytest.raises(TypeError):  # it would be compared
        open_session(changed, provider="auto")
    monkeypatch.setattr(providers, "vector_instructions", lambda: ("avx2",))
    with pytest.raises(TypeError):  # on another processor as well
        open_session(output, provider="auto")
    precision, _ = find_provider(ModelFile.open(output), "auto")
    assert precision.precision == ("bf16" if chosen.precision == "bf16" else "fp32")
    providers.plugin_devices.cache_clear()


def test_a_stamp_loads_no_library(monkeypatch: pytest.MonkeyPatch, fused: Path) -> None:
    """Metadata are untrusted, and a library is code."""
    monkeypatch.setattr(session, "made_for", lambda _model: {"provider": "openvino:CPU?library=evil.so"})
    monkeypatch.setattr(session, "provider_problem", None)  # is not even asked
    assert find_provider(ModelFile.open(fused), "auto")[0] == ExecutionProvider("cpu")


def test_auto_alone_is_no_provider_to_optimize_for() -> None:
    """It is chosen together with the precision."""
    with pytest.raises(OptionError, match="the provider auto is chosen together with a precision, and that is int8"):
        OptimizeOptions("m.onnx", provider="auto", precision="int8")


def test_commands_take_a_provider_and_its_details(tmp_path: Path, trained: Path, library: Path) -> None:
    """Answers, a benchmark and a corpus, on the same plugin."""
    where = ["--provider", "openvino:CPU", "--provider_library", str(library)]
    text = ["--text", "a dog runs", "--text", "a cat sleeps"]
    on_cpu, there = (
        json_of(run_onnxtool(tmp_path, "infer", trained, *text, *place, "--format", "json"))
        for place in (["--provider", "cpu"], where)
    )
    assert there["provider"] == f"openvino:CPU?library={library}"
    np.testing.assert_allclose(there["similarities"], on_cpu["similarities"], atol=1e-5)
    sizes = ["--batch_size", "1", "--sequence_length", "8", "--runs", "2"]
    option = ["--provider_option", "PERFORMANCE_HINT=THROUGHPUT"]
    timed = run_onnxtool(tmp_path, "infer", trained, "--benchmark", *sizes, *where, *option, "--format", "json")
    assert json_of(timed)["provider"] == f"openvino:CPU?PERFORMANCE_HINT=THROUGHPUT&library={library}"
    corpus = tmp_path / "texts.txt"
    corpus.write_text("".join(f"text number {number} of these\n" for number in range(40)))
    vectors = []
    for name, options in (("a", {"provider": "cpu"}), ("b", {"provider": "openvino", "provider_library": library})):
        encode_corpus(trained, corpus, tmp_path / name, CorpusOptions(**options, workers=2))
        (shard,) = (tmp_path / name).glob("*.npy")
        vectors.append(np.load(shard))
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-5)


def test_answers_say_where_they_come_from(tiny: Path, openvino: str) -> None:
    """In the report, for a Makefile's log."""
    assert run_texts(InferOptions(tiny, texts=("a",), provider=openvino)).provider == openvino


@pytest.mark.parametrize("kind", ["plain", "fused", "int8", "other operators"])
def test_the_provider_says_which_nodes_it_takes(
    kind: str, openvino: str, tiny: Path, fused: Path, trained_int8: tuple[Path, OptimizeReport], tmp_path: Path
) -> None:
    """As a profile of a run shows them, and a session without the CPU opens only if none is left."""
    others = {"plain": tiny, "fused": fused, "int8": Path(trained_int8[1].output)}
    path = others.get(kind) or _with_fast_gelu(tmp_path / "gelu.onnx")
    process = run_onnxtool(tmp_path, "env", "--model", path, "--provider", openvino, "--format", "json")
    found = json.loads(process.stdout)
    left = _nodes_on_the_cpu(path, openvino, tmp_path)
    assert {(node["operator"].rpartition(":")[2], node["name"]) for node in found["refused"]} == left
    assert (bool(left), process.returncode) == ((True, 1) if kind == "other operators" else (False, 0))
    assert found["opens"] == _opens_without_the_cpu(path, openvino)
    assert (found["asked"], found["whole"]) == (True, not left)


def test_operators_are_known_from_the_error_of_a_file_that_does_not_load(openvino: str, tmp_path: Path) -> None:
    """OpenVINO claims such nodes, and cannot compile them."""
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=(16, 32)).astype(np.float32) for name in ("cos", "sin")}
    body = "[plain] h = Mul(x, x) [rotary] y = com.microsoft.RotaryEmbedding(h, p, cos, sin)"
    path = save_text(
        tmp_path / "m.onnx", f"g (float[b, 6, 64] x, int64[b, 6] p) => (float[b, 6, 64] y) {{ {body} }}", weights
    )
    process = run_onnxtool(tmp_path, "env", "--model", path, "--provider", openvino, "--format", "json")
    found = json.loads(process.stdout)
    refused = {"operator": "com.microsoft::RotaryEmbedding", "name": "rotary", "layer": ""}
    assert (process.returncode, found["refused"], found["num_taken"]) == (1, [refused], 0)


def _session_options(openvino: str) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    providers.apply_provider(options, ExecutionProvider.parse(openvino), 1)
    return options


def _nodes_on_the_cpu(path: Path, openvino: str, folder: Path) -> set[tuple[str, str]]:
    """Profile a run; copies between providers are no nodes of the file."""
    options = _session_options(openvino)
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = ort.InferenceSession(path, options)
    shapes = {one.name: (2, 6, 64)[: len(one.shape)] for one in session.get_inputs()}
    session.run(None, {name: np.ones(shape, np.float32 if name == "x" else np.int64) for name, shape in shapes.items()})
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [event["args"] | {"name": event["name"]} for event in events if event.get("cat") == "Node"]
    on_cpu = [node for node in nodes if node.get("provider") == "CPUExecutionProvider"]
    return {(node["op_name"], node["name"].removesuffix("_kernel_time")) for node in on_cpu}


def _opens_without_the_cpu(path: Path, openvino: str) -> bool:
    options = _session_options(openvino)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        ort.InferenceSession(path, options)
    except Fail:
        return False
    return True


@pytest.fixture(scope="session")
def compiled(tiny: Path, library: Path, workshop: Workshop) -> Path:
    """What OpenVINO compiles from an encoder: in a folder with the file that it was compiled from, and a set."""

    def make(folder: Path) -> None:
        folder.mkdir()
        options = OptimizeOptions(
            tiny, output=folder / "plain.onnx", provider="openvino", provider_library=library, timing=False
        )
        optimize_model(options)
        optimize_model(replace(options, output=folder / "m.onnx", compiled=True))
        optimize_model(replace(options, output=folder / "set.onnx", compiled=True, sizes="1x8,2x16"))

    return workshop.made("compiled", make)


@pytest.fixture
def changed(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the compiled file, to be changed."""
    shutil.copytree(compiled, tmp_path / "copy")
    return tmp_path / "copy" / "m.onnx"


_PART = "m_OpenVINOExecutionProvider.bin"


def test_a_compiled_file_gives_what_its_source_gives_there_bit_by_bit(compiled: Path, openvino: str) -> None:
    one, other = (open_session(compiled / name, provider=openvino) for name in ("m.onnx", "plain.onnx"))
    assert one.model.structure.ops == {"com.microsoft::EPContext": 1}
    for name, wanted in other.run(_feeds(other)).items():
        np.testing.assert_array_equal(one.run(_feeds(one))[name], wanted)


def test_a_compiled_file_of_fixed_sizes_runs_as_its_set(compiled: Path, openvino: str) -> None:
    together, alone = (open_session(compiled / name, provider=openvino) for name in ("set.onnx", "plain.onnx"))
    feeds = {name: array[:, :11] for name, array in _feeds(alone).items()}
    found, real = together.run(feeds), feeds["attention_mask"] != 0
    for name, wanted in alone.run(feeds).items():
        where = real if wanted.ndim > 2 else slice(None)
        np.testing.assert_allclose(found[name][where], wanted[where], atol=1e-5)
    with pytest.raises(ProviderError, match=r"set-1x8\.onnx is compiled for openvino, and here is cpu"):
        open_session(compiled / "set.onnx", provider="cpu")


def test_a_compiled_set_is_verified_on_its_provider_and_knows_its_files_and_steps(
    compiled: Path, tiny: Path, library: Path
) -> None:
    found = verify(compiled / "set.onnx", tiny, VerifyOptions(provider="openvino", provider_library=library))
    assert found.passed
    assert {case.description.partition(":")[0] for case in found.cases} >= {"1x8", "2x16"}
    assert {*ModelFile.open(compiled / "set.onnx").files} == {*compiled.glob("set*.*")}
    assert [step["step"] for step in ModelFile.open(compiled / "set-1x8.onnx").steps[-2:]] == ["optimize", "sizes"]


def test_a_compiled_file_is_refused_by_name_on_another_provider(compiled: Path) -> None:
    with pytest.raises(ProviderError, match=r"m\.onnx is compiled for openvino, and here is cpu") as caught:
        open_session(compiled / "m.onnx", provider="cpu")
    assert "--provider openvino" in caught.value.hint


@pytest.mark.parametrize(
    ("function", "value", "message"),
    [
        ("provider_version", "2.0", r"compiled for version \S+, and here is version 2\.0"),
        ("runtime_version", "1.99.0", r"compiled for onnxruntime \S+, and here is onnxruntime 1\.99\.0"),
        ("provider_hardware", "sve", "and here is sve"),
    ],
)
def test_a_compiled_file_is_refused_in_another_version_and_on_other_hardware(
    compiled: Path, openvino: str, monkeypatch: pytest.MonkeyPatch, function: str, value: str, message: str
) -> None:
    monkeypatch.setattr(compiled_files, function, lambda *_: value)
    with pytest.raises(ProviderError, match=message):
        open_session(compiled / "m.onnx", provider=openvino)


@pytest.mark.parametrize("way", ["cut", "changed", "missing", "graph", "elsewhere"])
def test_a_compiled_file_whose_parts_were_changed_is_refused(changed: Path, openvino: str, way: str) -> None:
    """No part of it reaches the provider."""
    part = changed.with_name(_PART)
    content, graph = part.read_bytes(), changed.read_bytes()
    if way == "cut":
        part.write_bytes(content[:-1000])
    elif way == "changed":
        part.write_bytes(content[:5000] + b"x" + content[5001:])
    elif way == "missing":
        part.unlink()
    elif way == "graph":  # another onnxruntime, say
        changed.write_bytes(graph.replace(b'ep_sdk_version"', b'ep_sdk_versioN"'))
        assert changed.read_bytes() != graph
    else:
        changed.write_bytes(graph.replace(_PART.encode(), b"/" + _PART.encode()[1:], 1))
    with pytest.raises(ModelFileError, match=r"m\.onnx is not what openvino compiled"):
        open_session(changed, provider=openvino)


def test_a_compiled_file_is_not_optimized_and_a_provider_that_compiles_nothing_is_named(
    compiled: Path, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(PassError, match="is compiled for openvino, and has no operators to optimize"):
        optimize_model(OptimizeOptions(compiled / "m.onnx", output=tmp_path / "m.onnx"))
    with pytest.raises(OptionError, match="cpu compiles nothing"):
        OptimizeOptions(tiny, output=tmp_path / "m.onnx", compiled=True)


def test_a_compiled_part_goes_with_its_graph(changed: Path, tiny: Path) -> None:
    """A file that replaces the graph leaves no compiled part behind, and no other file is taken for one."""
    changed.with_name("m_other.bin").write_bytes(b"mine")
    optimize_model(OptimizeOptions(tiny, output=changed, timing=False, force=True))
    assert sorted(path.name for path in changed.parent.glob("m*")) == ["m.onnx", "m_other.bin"]


def test_stats_and_the_plan_say_what_is_compiled(compiled: Path, tiny: Path, tmp_path: Path, library: Path) -> None:
    shown = run_onnxtool(tmp_path, "stats", compiled / "m.onnx").stdout
    assert "Compiled for: openvino" in shown
    assert f"Compiled part: {_PART}" in shown
    command = ("optimize", tiny, "--provider", "openvino", "--provider_library", library, "--compile", "--dry_run")
    assert "what openvino compiles goes to a file of its own" in run_onnxtool(tmp_path, *command).stdout
