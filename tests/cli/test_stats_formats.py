"""What reviewers look at: Markdown for a comment on a pull request, and a page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxtool.cli.render import Table
from onnxtool.model_file.metadata import STEPS_KEY, stamp
from tests.cli.entry_point import run_onnxtool
from tests.cli.screens import screen
from tests.graphs import make_model, save_operators, value

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STEPS = '[{"step":"optimize","verified":true,"max_abs_error":1.2e-6,"reference":"base.onnx","cases":9}]'
NEEDS = "| Needs | ai.onnx 20, com.microsoft 1; IR 10; onnxruntime 1.18 |"
MOST_LINES = 12
ATTACK = (
    """</code><script>document.title='owned'</script><img src=x onerror=alert(1)>`|@everyone **bold** [a](b) &lt;"'"""
)


def save(path: Path, layers: dict[int, list[str]], inputs: list[Any] | None = None, **weights: int) -> None:
    nodes = [
        helper.make_node(op, ["x"], [f"{layer}_{index}"], name=f"/bert/layer.{layer}/{op}_{index}")
        for layer, ops in layers.items()
        for index, op in enumerate(ops)
    ]
    tensors = [numpy_helper.from_array(np.full(size, size, np.float32), name) for name, size in weights.items()]
    onnx.save(make_model(nodes, tensors, inputs=inputs), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "base.onnx", {0: ["MatMul", "Erf", "Mul"], 1: ["MatMul", "Erf", "Mul"]}, same=10, old=20, gone=30)
    save(tmp_path / "model.onnx", {0: ["MatMul", "Gelu"], 1: ["MatMul", "Erf", "Mul"]}, same=10, new=20, old=40)
    stamp(tmp_path / "model.onnx", {STEPS_KEY: STEPS, "author": "somebody"})
    return tmp_path


def markdown(folder: Path, *arguments: str) -> str:
    result = run_onnxtool(folder, "stats", *arguments, "--format", "markdown")
    assert "Traceback" not in result.stderr
    return result.stdout


def top_of(text: str) -> list[str]:
    """The lines before the first that is folded."""
    return text.split("\n<details>")[0].rstrip("\n").split("\n")


def test_the_top_of_a_difference_is_what_a_reviewer_needs(folder: Path) -> None:
    """Twelve lines at most, whatever is asked for: figures, interface, operators, weights, gates, proof."""
    options = ("--fail_if", "num_nodes<+0", "--fail_if", "num_nodes>1")
    top = top_of(markdown(folder, "model.onnx", "base.onnx", *options))
    assert len(top) <= MOST_LINES
    assert top[0] == "### `model.onnx` against `base.onnx`"
    assert "| Number of nodes | 6 | 5 | -1, -16.7% |" in top
    assert "| Parameters | 60 | 70 | +10, +16.7% |" in top
    text = "\n".join(top[-2:])
    assert "**Interface:** inputs and outputs unchanged" in text
    assert "**Operators:** 1 added, 2 changed" in text
    assert "**Initializers:** 1 added, 1 removed, 1 changed" in text
    assert "`num_nodes is 5, fails if num_nodes>1`" in text
    assert "optimize, verified: reference base.onnx, max_abs_error 1.2e-06, cases 9" in text


def test_changes_of_the_interface_stand_at_the_top(folder: Path) -> None:
    """Whoever feeds the model must not have to unfold anything."""
    save(folder / "other.onnx", {0: ["MatMul"]}, [value("x", [1, 3]), value("mask", [1])])
    top = "\n".join(top_of(markdown(folder, "other.onnx", "base.onnx")))
    assert "**Interface:** ⚠ the inputs differ (1 added, 0 removed, 1 changed)" in top


def test_details_are_folded_and_complete(folder: Path) -> None:
    """Operators, parts by scope, initializers by name, dtype and shape, and metadata."""
    text = markdown(folder, "model.onnx", "base.onnx", "--no_weights")
    assert text.count("<details>") == text.count("</details>") == 8
    assert "| `Gelu` | 0 | 1 | +1 |" in text
    assert "| `bert.layer.0` | 3 | 2 | -1 |" in text
    assert "bert.layer.1" not in text
    assert "| `old` | `float32 [20]` | `float32 [40]` |" in text
    assert "| `gone` | `float32 [30]` | absent |" in text
    assert "| `author` | absent | `somebody` |" in text


def test_weights_are_compared_by_their_data(folder: Path) -> None:
    """A weight that only changed its name is told as such, and one of other data as changed, in every format."""
    save(folder / "renamed.onnx", {0: ["MatMul", "Erf", "Mul"], 1: ["MatMul", "Erf", "Mul"]}, same=10, old=20, fresh=30)
    text = markdown(folder, "renamed.onnx", "base.onnx")
    assert "| `gone` | `fresh` |" in text
    assert "Initializers (" not in text
    model = onnx.load(folder / "base.onnx")
    model.graph.initializer[0].raw_data = np.zeros(10, np.float32).tobytes()
    onnx.save(model, folder / "other.onnx")
    compared = ("stats", "other.onnx", "base.onnx", "--format")
    shown = {name: run_onnxtool(folder, *compared, name).stdout for name in ("text", "markdown", "html", "json")}
    assert "**Initializers:** 1 changed" in shown["markdown"]
    assert "Initializers: 3, was 3 (1 changed)" in shown["text"].splitlines()
    assert "1 changed" in shown["html"]
    assert list(json.loads(shown["json"])["delta"]["weights"]["changed"]) == ["same"]
    assert "**Initializers:** 3 not compared by their data" in markdown(
        folder, "other.onnx", "base.onnx", "--no_weights"
    )


def test_a_summary_has_its_top_and_its_details(folder: Path) -> None:
    """The same for one model."""
    text = markdown(folder, "model.onnx", "--fail_if", "num_nodes>1")
    top = top_of(text)
    assert len(top) <= MOST_LINES
    assert top[0] == "### `model.onnx`"
    assert NEEDS in top
    assert "| `old` | `float32` | `[40]` | 160 B |" in text
    assert "| `x` | `float32` | `[batch, 3]` |" in text


@pytest.mark.parametrize("length", [30, 45, 60, 300])
def test_a_comment_fits_where_comments_go(folder: Path, length: int) -> None:
    """GitHub takes 65,536 characters; what is too long is left out, and said so."""
    # Backticks, as each of them becomes an entity.
    weights: dict[str, Any] = {f"{'`' * length}{index}": 1 for index in range(300)}
    save(folder / "long.onnx", {layer: [f"{'`' * length}{layer}"] for layer in range(300)}, **weights)
    stamp(folder / "long.onnx", {f"{'`' * length}{index}": "`" * 5000 for index in range(300)})
    text = markdown(folder, "long.onnx", "base.onnx")
    assert len(text) < 65_536
    assert "`--format json` has them" in text


@pytest.fixture
def hostile(folder: Path) -> Path:
    """A model whose names attack whoever renders them."""
    model = make_model([helper.make_node(ATTACK, ["x"], ["y"], domain=ATTACK, name=f"/{ATTACK}/layer.0/n")])
    model.graph.input[0].name = ATTACK
    model.producer_name = "W" * 150
    model.opset_import.add(domain=ATTACK, version=1)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), f"bert.{ATTACK}.w"))
    helper.set_model_props(model, {ATTACK: ATTACK, STEPS_KEY: '[{"step":"@me <b>","verified":true,"reference":"<i>"}]'})
    onnx.save(model, folder / "hostile.onnx")
    return folder


@pytest.mark.parametrize("arguments", [["hostile.onnx"], ["hostile.onnx", "base.onnx"]], ids=["summary", "difference"])
def test_names_are_no_markdown(hostile: Path, arguments: list[str]) -> None:
    """Outside of code spans nothing of a name is left that Markdown or HTML would read."""
    text = markdown(hostile, *arguments)
    outside = re.sub(r"(`+)(?:(?!\1).)+\1", "", text)
    for piece in ("<script", "<img", "@everyone", "@me", "**bold**", "[a]", "<b>", "<i>"):
        assert piece not in outside
    for line in text.splitlines():
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 5)


def test_names_are_no_links(folder: Path) -> None:
    """GitHub makes a link of a bare address, wherever that leads."""
    model = make_model([helper.make_node("Exp", ["x"], ["y"])])
    model.opset_import.add(domain="https://evil.example", version=1)
    steps = '[{"step":"www.evil.example","verified":true,"reference":"HTTP://evil.example"}]'
    helper.set_model_props(model, {STEPS_KEY: steps})
    onnx.save(model, folder / "links.onnx")
    text = markdown(folder, "links.onnx", "base.onnx")
    outside = re.sub(r"(`+)(?:(?!\1).)+\1", "", text)
    assert "evil.example" in text
    assert "evil.example" not in outside


RECORD = {
    "step": "optimize",
    "precision": "int8",
    "verified": True,
    "reference": "m.onnx",
    "verified_on": "cpu",
    "cases": 9,
    "max_abs_error": 0.25,
    "cosine_min": 0.9931,
    "atol": 0.5,
    "rtol": 0.01,
    "cosine_required": 0.99999,
    "mask_effect": 4.0,
    "padding_effect": None,
    "error": 0.004,
    "arithmetic": {"exact": 0.003, "per_row": 0.004, "saturating": None},
    "passes": {"gelu": 3, "einsum_products": 0},
}
RECORDED = [
    ("Result", "passed"),
    ("Verified against", "m.onnx"),
    ("Verified on", "cpu"),
    ("Cases", "9"),
    ("max_abs_error", "0.25"),
    ("Lowest cosine", "0.99310000"),
    ("Allowed", "0.5 + 0.01 x largest value, cosine 0.99999"),
    ("Moving the mask moves the outputs by", "4"),
    ("Quantization error", "1 - cosine 0.004"),
    ("Error in exact arithmetic", "1 - cosine 0.003"),
    ("Error in per_row arithmetic", "1 - cosine 0.004"),
    ("Error in saturating arithmetic", "not for such CPUs"),
]


def test_the_record_of_verification_has_each_step_and_arithmetic(folder: Path) -> None:
    """Steps stand side by side; the details have the rest, without the passes that did nothing."""
    export = {"step": "export", "verified": False, "exporter": "dynamo"}
    save(folder / "int8.onnx", {0: ["MatMul"]})
    stamp(folder / "int8.onnx", {STEPS_KEY: json.dumps([export, RECORD])})
    for arguments in (["int8.onnx"], ["int8.onnx", "base.onnx"]):
        text = markdown(folder, *arguments)
        assert "| Figure | 1. export | 2. optimize int8 |" in text
        assert "| Result | not verified | passed |" in text
        for label, figure in RECORDED[1:]:
            assert f"| {label} | - | {figure} |" in text
    assert "| `2. optimize int8` | `precision int8, passes (gelu 3)` |" in markdown(folder, "int8.onnx")


def test_a_forged_record_of_verification_is_shown_and_bounded(folder: Path) -> None:
    """Values of any type, as many as anybody likes."""
    forged = {
        "step": ["|"],
        "verified": True,
        "cosine_min": "high",
        "atol": {},
        "arithmetic": {str(n): n for n in range(99)},
    }
    save(folder / "forged.onnx", {0: ["MatMul"]})
    stamp(folder / "forged.onnx", {STEPS_KEY: json.dumps([forged] * 9)})
    blocks = run_onnxtool(folder, "stats", "forged.onnx").stdout.split("\n\n")
    lines = next(block for block in blocks if block.startswith("Verification")).splitlines()
    assert len(lines) == 43  # the title, the names of the columns, 40 rows and what says that there are more
    assert lines[1].split()[1::2] == ["7.", "8.", "9."]
    assert lines[3].split() == ["Lowest", "cosine", *["high"] * 3]
    assert "7. &#91;&#124;&#93;" in markdown(folder, "forged.onnx")


class _Page(HTMLParser):
    """The tags of a page, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.parametrize("arguments", [["hostile.onnx"], ["hostile.onnx", "base.onnx"]], ids=["summary", "difference"])
def test_a_page_holds_no_tag_of_a_name_and_loads_nothing(hostile: Path, arguments: list[str]) -> None:
    """Only tags that a page needs; no script, no link, no address."""
    page = run_onnxtool(hostile, "stats", *arguments, "--format", "html").stdout
    parser = _Page(page)
    assert not parser.tags & {"script", "img", "link", "iframe", "a", "object", "code", "b"}
    assert not parser.attributes & {"src", "href", "onerror", "srcset", "action"}
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_names_on_a_page_break_after_their_separators(folder: Path) -> None:
    """And not within a number or a word, but for words that are longer than a narrow page."""
    weights: dict[str, Any] = {"bert.layer.0.weight": 1, "q" * 30: 2}
    save(folder / "names.onnx", {0: ["Gelu"]}, **weights)
    stamp(folder / "names.onnx", {STEPS_KEY: STEPS})
    page = run_onnxtool(folder, "stats", "names.onnx", "--format", "html").stdout
    assert ">bert.layer.0.<wbr>weight<" in page
    assert "<h1>names.onnx</h1>" in page
    assert f'><span class="long">{"q" * 30}</span><' in page
    assert "1.2e-06" in page


@pytest.mark.skipif(BROWSER is None, reason="no chromium here; CI installs Debian's package of that name")
def test_a_browser_shows_the_page(hostile: Path) -> None:
    """At any width bars follow the figures and nothing is wider than the page; no name is run."""
    for page, arguments in (("hostile", ["hostile.onnx", "base.onnx"]), ("base", ["base.onnx"])):
        run_onnxtool(hostile, "stats", *arguments, "--format", "html", "--output", f"{page}.html")
    text = (hostile / "hostile.html").read_text(encoding="utf-8")
    assert "owned" in text
    dom = browse(hostile / "hostile.html", "--dump-dom")
    assert "<title>owned" not in dom
    assert dom.count('class="bar') == text.count('class="bar') > 0
    for width, pixels in shown(hostile, "hostile", "base").items():
        assert len(np.unique(pixels["hostile"][:, -12:])) == 1
        blue = np.abs(pixels["base"].astype(int) - (0x2F, 0x6F, 0xEB)).sum(axis=2) < 12
        widths = sorted({int(row.sum()) for row in blue if row.sum() > 20}, reverse=True)
        assert len(widths) >= 2  # bars of two lengths at least: three dtypes or operators of different counts
        assert widths[0] > width / 2


def shown(folder: Path, *pages: str, widths: Sequence[int] = (320, 420, 1000)) -> dict[int, dict[str, Any]]:
    """Return the pixels of each page at each width, uint8 [3000, width, 3]; one start of the browser shows them all."""
    frame = '<iframe src="{}.html" style="border: 0; flex: none; width: {}px; height: 3000px"></iframe>'
    frames = [frame.format(page, width) for width in widths for page in pages]
    (folder / "all.html").write_text(f'<body style="margin: 0; display: flex">{"".join(frames)}</body>')
    screenshot = folder / "all.png"
    browse(folder / "all.html", f"--screenshot={screenshot}", f"--window-size={sum(widths) * len(pages)},3000")
    edges = np.cumsum([width for width in widths for _ in pages])[:-1]
    pictures = iter(np.split(picture(screenshot), edges, axis=1))
    return {width: {page: next(pictures) for page in pages} for width in widths}


def browse(page: Path, *options: str) -> str:
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'profile'}",
    ]
    done = subprocess.run(
        [*command, *options, page.as_uri()], capture_output=True, encoding="utf-8", timeout=120, check=True
    )
    return done.stdout


def picture(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("name", "begins"), [("a.json", "{"), ("a.md", "###"), ("a.HTML", "<!doctype html>"), ("a.txt", "m.onnx:")]
)
def test_the_suffix_of_the_output_is_its_format(tmp_path: Path, name: str, begins: str) -> None:
    """Unless --format names one."""
    save_operators(tmp_path / "m.onnx", ["Relu"])
    assert run_onnxtool(tmp_path, "stats", "m.onnx", "--output", name).returncode == 0
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(begins)
    assert run_onnxtool(tmp_path, "stats", "m.onnx", "--output", name, "--force", "--format", "text").returncode == 0
    assert (tmp_path / name).read_text(encoding="utf-8").startswith("m.onnx:")


def test_ten_columns_of_figures_fit_a_terminal_of_80_columns() -> None:
    """No title is broken and no line is longer: the columns stand closer than usual."""
    columns = ("measure", "model", "base", "change", "relative", "from", "to", "p", "better", "worse")
    row = ("Recall@100", "0.9600", "0.9000", "+0.0600", "+6.67%", "+0.0200", "+0.1100", "0.0316", "6", "0")
    shown = screen([Table(columns, [row], frozenset(columns[1:]))], 80).splitlines()
    assert shown[0].split() == list(columns)
    assert max(map(len, shown)) <= 80
