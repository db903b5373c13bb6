"""Quality decides precision: what refuses candidates of an optimization by how well they find what is relevant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnxtool.checkpoint.folder import find_checkpoint_folder
from onnxtool.errors import GateError
from onnxtool.evaluation.options import EvaluateOptions
from onnxtool.evaluation.run import check_evaluation, evaluate_model
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import PARTNER_KEY
from onnxtool.optimize import Judge, Judgement
from onnxtool.options import StrPath, checked


@checked
def judge_by_retrieval(model_path: StrPath, data: StrPath, options: EvaluateOptions) -> Judge:
    """Return what evaluates a candidate on the collection in `data`, and refuses it where a gate is met.

    Relative gates refer to the model that is optimized, at `model_path`.

    Args:
        model_path: the ONNX file that is optimized; its tokenizer is found beside it.
        data: as for `evaluate_model`.
        options: with at least one gate.

    Raises:
        GateError: there is no gate, or one is malformed.
        InputError: the collection cannot be read.
        OnnxtoolError: the model cannot be used.
    """
    model_path, data = Path(model_path), Path(data)
    if not options.fail_if:
        raise GateError(
            "a collection decides nothing without a condition",
            "pass what is not allowed, such as --fail_if 'ndcg@10<-0.5%'",
        )
    folder = find_checkpoint_folder(ModelFile.open(model_path), options.model_name)
    # Candidates are no neighbours of the partner, which they name as the model does.
    name = ModelFile.open(model_path).plain_name(PARTNER_KEY)
    partner = options.partner or (None if name is None else model_path.with_name(name))
    options = replace(options, model_name=str(folder.path), against=str(model_path), partner=partner)
    check_evaluation(model_path, data, options)

    def judge(path: Path) -> Judgement:
        report = evaluate_model(path, data, options)
        met = [gate.text for gate in report.gates if gate.met]
        return Judgement({name: measure.mean for name, measure in report.measures.items()}, "; ".join(met))

    return judge
