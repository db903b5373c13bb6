"""What `onnxtool infer` is asked for, and the options that it shares with benchmarks and corpora."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from onnxtool.options import Option
from onnxtool.runtime.bounds import MAX_THREADS
from onnxtool.runtime.providers import PROVIDERS

LONG_TEXTS = ("truncate", "window", "fail")

ModelName = Annotated[
    str | None,
    Option(
        "Folder or hub id with tokenizer.json.",
        default="the files beside the model",
        metavar="ID_OR_DIR",
        is_checkpoint=True,
    ),
]
Prompt = Annotated[
    str | None,
    Option(
        "Written before each text: the name of one of the checkpoint's prompts, or the prompt itself; '' for none.",
        default="as the checkpoint says",
    ),
]
TextTask = Annotated[
    str | None,
    Option(
        "Read texts as queries or as documents: with the prompt of that name, and the length and the tokens that count "
        "of the checkpoint.",
        choices=("query", "document"),
        default="document for late interaction, else neither",
    ),
]
Representation = Annotated[
    str | None,
    Option(
        "Of an M3 embedder (bge-m3): a vector for each text, weights of its terms, or a vector for each token.",
        choices=("dense", "sparse", "colbert"),
        default="dense",
    ),
]
Provider = Annotated[
    str, Option("Where to run: cuda fails where it cannot, auto uses it where it can.", choices=("auto", *PROVIDERS))
]
Long = Annotated[
    str | None,
    Option(
        "What happens to texts that are longer than the model takes: cut, read in windows, or refused. In a folder of "
        "vectors, a window is a passage of its own, ID#0, ID#1 and so on.",
        choices=LONG_TEXTS,
        default="window for questions, else truncate",
    ),
]
Overlap = Annotated[
    int | None, Option("Tokens that neighbouring windows share.", minimum=0, default="a quarter of a window")
]
Threads = Annotated[int, Option("Intra-op threads; 0: one per core.", minimum=0, maximum=MAX_THREADS)]


@dataclass(frozen=True)
class InferOptions:
    """What to run, and how.

    Attributes:
        model_path: the ONNX file.
        model_name: the checkpoint's folder, or its id on the hub, in place of the files beside the model.
        texts: texts to run.
        images: picture files to run, for a model of pictures.
        query: makes a pair with every text; what pictures are ranked for.
        text_model: the ONNX file of the other side of a dual encoder, which encodes the query for pictures.
        input_path: a file of further texts, the folder of a test collection, or a folder or list of pictures.
        prompt: the name of one of the checkpoint's prompts, or a text to write before each; None for that of the task,
            or for the default.
        task: what the texts are for, `query` or `document`; None for neither.
        representation: of an M3 embedder, `dense`, `sparse` or `colbert`; None for dense, and for other models.
        long: what happens to long texts, one of LONG_TEXTS; None for what suits the task.
        overlap: tokens that neighbouring windows share; None for a quarter of a window.
        top_k: the most candidates of a text; None for what suits the task.
        provider: `auto`, `cpu` or `cuda`.
        threads: intra-op threads; 0 for one per core.
    """

    model_path: Annotated[Path, Option("The ONNX file.", is_location=True)]
    model_name: ModelName = None
    texts: Annotated[tuple[str, ...], Option("A text to run; may be given several times.", name="text")] = ()
    images: Annotated[
        tuple[str, ...], Option("A picture to run, of a model of pictures; may be given several times.", name="image")
    ] = ()
    query: Annotated[
        str | None,
        Option(
            "Makes a pair with every text: a query to rank texts for, a question to answer from them, or a premise. "
            "With --image, what to rank pictures for."
        ),
    ] = None
    text_model: Annotated[
        Path | None, Option("The ONNX file that encodes --query, where --model_path encodes pictures.")
    ] = None
    input_path: Annotated[
        Path | None,
        Option(
            "A file of texts: .txt, or .jsonl with id, contents and, for pairs, query on each line, also with .gz; - "
            "is stdin. Of the folder of a test collection, its documents. For a model of pictures, a folder of them, "
            "or a file with a path, or id and image, on each line.",
            name="input",
            is_location=True,
        ),
    ] = None
    prompt: Prompt = None
    task: TextTask = None
    representation: Representation = None
    long: Long = None
    overlap: Overlap = None
    top_k: Annotated[
        int | None,
        Option(
            "Candidates for each text; of what is written, the tokens to draw from.",
            minimum=1,
            default="10 terms or tokens, 3 answers, all labels",
        ),
    ] = None
    provider: Provider = "auto"
    threads: Threads = 0
