"""Diagnosis: numbers against slow references, text, figures, files and errors."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.diagnosis import ensembles
from tests.reference import scores
from tests.support.scripts import load_script
from torchace import diagnose
from torchace.diagnosis import Diagnosis, diagnose_file

EXACT = {"rel": 1e-10, "abs": 1e-12}  # float64, some hundred operations


@pytest.mark.parametrize("weights", [None, [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
def test_numbers_against_the_references(weights):
    logits, target = ensembles.healthy(60, members=3)
    logits = logits.double()
    alpha = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    n = diagnose(logits, target, member_weights=weights).numbers
    probs = scores.ensemble_probs(logits, alpha)
    assert n["accuracy"] == pytest.approx(float((probs.argmax(1) == target).double().mean()), **EXACT)
    assert n["cross_entropy"] == pytest.approx(float(-probs[range(60), target].log().mean()), **EXACT)
    assert n["brier"] == pytest.approx(scores.brier_score(probs, target), **EXACT)
    assert n["calibration_error"] == pytest.approx(scores.calibration_error(probs, target, 15), **EXACT)
    assert n["disagreement"] == pytest.approx(float(scores.disagreement(logits)), **EXACT)
    assert n["mutual_information"] == pytest.approx(float(scores.mutual_information(logits, alpha)), **EXACT)
    assert n["ambiguity"] == pytest.approx(float(scores.ambiguity(logits, target, alpha)), **EXACT)
    assert n["entropy"] == pytest.approx(float(-(probs * probs.log()).sum(1).mean()), **EXACT)
    assert n["chance"] == max(float((target == c).double().mean()) for c in range(4))
    pairwise = scores.pairwise_cross_entropy(logits)
    for j in range(3):
        assert n["member_accuracy"][j] == float((logits[j].argmax(1) == target).double().mean())
        for k in range(3):
            assert n["divergence"][j][k] == pytest.approx(float(pairwise[j, k] - pairwise[j, j]), abs=1e-12)
        rest = [k for k in range(3) if k != j]
        share = None if weights is None else torch.tensor([weights[k] for k in rest], dtype=torch.float64)
        if share is not None:
            share = share / share.sum() if share.sum() > 0 else None
        without = scores.ensemble_probs(logits[rest], share).argmax(1) == target
        assert n["accuracy_without"][j] == float(without.double().mean())


def test_accuracy_of_half():
    """With four members, the six halves are drawn equally often in the long run; two members' halves are members."""
    logits, target = ensembles.healthy(400, members=2)
    n = diagnose(logits, target).numbers
    assert n["accuracy_of_half"] == pytest.approx(sum(n["member_accuracy"]) / 2, **EXACT)
    logits, target = ensembles.healthy(400, members=4, own=2.0)
    every = [logits[list(pair)].softmax(2).mean(0).argmax(1) == target for pair in combinations(range(4), 2)]
    spread = [float(right.double().mean()) for right in every]
    assert min(spread) <= diagnose(logits, target).numbers["accuracy_of_half"] <= max(spread)


def test_input_types():
    logits, target = ensembles.healthy(200)
    expected = diagnose(logits, target).numbers
    same = diagnose(logits.double().requires_grad_(), target.int()).numbers
    assert same["cross_entropy"] == pytest.approx(expected["cross_entropy"], **EXACT)
    half = diagnose(logits.bfloat16(), target.to(torch.uint8)).numbers
    assert half["cross_entropy"] == pytest.approx(expected["cross_entropy"], rel=1e-2)  # bfloat16 has 8 bits
    assert diagnose(logits, target).numbers == expected  # nothing is drawn at random


def test_a_single_model():
    logits, target = ensembles.healthy(members=1)
    diagnosis = diagnose(logits, target)
    assert {finding.name for finding in diagnosis.findings} == {
        "chance",
        "calibration",
        "member_calibration",
        "classes",
    }
    assert diagnosis.figures().keys() == {"members", "reliability"}


def test_extreme_predictions():
    target = torch.arange(100) % 2
    sure = 1e4 * torch.nn.functional.one_hot(target, 2).double()
    diagnosis = diagnose(torch.stack([sure, -sure]), target)  # right for sure, wrong for sure
    assert diagnosis.numbers["disagreement"] == 1
    assert diagnosis.numbers["cross_entropy"] == pytest.approx(math.log(2))
    assert json.loads(diagnosis.to_json())["numbers"]["samples"] == 100
    diagnose(torch.stack([sure, sure]), target)
    diagnose(torch.zeros(3, 100, 2), target)
    one = diagnose(torch.tensor([[[1.0, 0.0]], [[0.0, 0.5]], [[0.0, 0.0]]]), torch.tensor([1]))  # has no interval
    assert "inf" not in str(one).replace("information", "")
    assert "Infinity" not in one.to_json()
    one.figures()


# -- text and figures ------------------------------------------------------------------------------------------------


def full_diagnosis() -> Diagnosis:
    (logits, target), (train, train_target) = ensembles.make_co_adapted(), ensembles.make_co_adapted(seed=1)
    return diagnose(logits, target, train_logits=train, train_target=train_target)


def test_text_and_json():
    diagnosis = full_diagnosis()
    text = str(diagnosis)
    for finding in diagnosis.findings:
        assert f"{finding.severity:8} {finding.name}: " in text
        assert finding.sentence.endswith(".")
        assert not finding.advice or finding.advice.endswith(".")
    assert text.startswith("3 members on 1,000 samples of 10 classes: accuracy ")
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert re.search(r"\d %", text)
    assert not re.search(r"\d%|^ *%|[ (]-\d", text, re.MULTILINE)  # as everywhere: 97 %, −0.1
    order = [finding.severity for finding in diagnosis.findings]
    assert order == sorted(order, key=["warning", "note", "ok"].index)
    again = json.loads(diagnosis.to_json())
    assert again["findings"][0]["name"] == diagnosis.findings[0].name
    assert again["numbers"] == diagnosis.numbers
    assert again == diagnosis.to_dict()
    assert repr(diagnosis).startswith("Diagnosis(3 members, 1000 samples, accuracy 0.")
    assert "co_adaptation" in repr(diagnosis)


def test_the_example(capsys):
    found = load_script("examples/existing_models.py").main()
    assert found["after"] >= found["before"] > 0.9
    assert "copies: Members 0 and 3 predict the same" in capsys.readouterr().out


def test_figures():
    for dark in (False, True):
        figures = full_diagnosis().figures(dark=dark)
        assert figures.keys() == {"members", "reliability", "pairs", "fewer_members", "train_and_test"}
        for png in figures.values():
            image = Image.open(io.BytesIO(png)).convert("RGB")
            assert image.width > 800
            assert len(image.getcolors(1 << 16)) > 10  # something is drawn
            assert (image.getpixel((0, 0)) == (255, 255, 255)) != dark


def test_many_members_are_drawn():
    logits, target = ensembles.healthy(100, members=40)
    assert len(diagnose(logits, target).figures()) == 4


def test_saved(tmp_path):
    diagnosis = full_diagnosis()
    files = diagnosis.save(tmp_path / "new" / "folder")
    assert sorted(files) == sorted((tmp_path / "new" / "folder").iterdir())
    assert (tmp_path / "new" / "folder" / "diagnosis.txt").read_text("utf-8") == f"{diagnosis}\n"
    assert json.loads((tmp_path / "new" / "folder" / "diagnosis.json").read_text("utf-8"))["findings"]


def test_text_needs_no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    diagnosis = full_diagnosis()
    assert str(diagnosis)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'torchace\[tool\]'"):
        diagnosis.figures()


# -- files ------------------------------------------------------------------------------------------------------------


def arrays() -> dict[str, np.ndarray]:
    (logits, target), (train, train_target) = ensembles.healthy(200), ensembles.healthy(100, seed=1)
    found = {"logits": logits, "target": target, "train_logits": train, "train_target": train_target}
    return {name: value.numpy() for name, value in found.items()}


def test_files(tmp_path):
    content = arrays()
    expected = diagnose(**{name: torch.tensor(value) for name, value in content.items()})
    np.savez(tmp_path / "a.npz", **content)
    np.savez_compressed(
        tmp_path / "b.npz",
        **{name: np.asfortranarray(v).astype(v.dtype.newbyteorder(">")) for name, v in content.items()},
        class_names=np.array(["a", "b", "c", "d"]),
        more=np.ones(3),
    )
    save_file({name: torch.tensor(value) for name, value in content.items()}, tmp_path / "c.safetensors")
    for name in ("a.npz", "b.npz", "c.safetensors"):
        found = diagnose_file(tmp_path / name)
        assert found.numbers == expected.numbers, name
        assert found["diversity_gap"].sentence == expected["diversity_gap"].sentence
    assert diagnose_file(str(tmp_path / "b.npz")).class_names == ("a", "b", "c", "d")
    np.savez(tmp_path / "w.npz", **content, member_weights=np.array([0.2] * 5))
    assert diagnose_file(tmp_path / "w.npz").numbers["member_weights"] == pytest.approx([0.2] * 5)


class CodeInPickle:
    def __reduce__(self):
        return (sys.exit, (99,))


def test_bad_files_raise_one_sentence(tmp_path):
    content = arrays()

    def diagnose_error(said: str, name: str = "a.npz") -> None:
        with pytest.raises(ValueError, match=said) as caught:
            diagnose_file(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)

    def write_npz(**change: object) -> None:
        np.savez(tmp_path / "a.npz", **{**content, **change})

    diagnose_error("There is no file", "none.npz")
    (tmp_path / "a.txt").write_text("logits", "utf-8")
    diagnose_error(r"Expected a \.npz or \.safetensors file", "a.txt")
    write_npz(logits=np.array([CodeInPickle()], dtype=object))
    diagnose_error("not a .npz file of plain arrays")
    (tmp_path / "a.npz").write_bytes(pickle.dumps({"logits": CodeInPickle()}))
    diagnose_error("not a .npz file of plain arrays")
    write_npz()
    data = (tmp_path / "a.npz").read_bytes()
    for end in (0, 10, len(data) // 2):
        (tmp_path / "a.npz").write_bytes(data[:end])
        diagnose_error("not a .npz file of plain arrays")
    np.save(tmp_path / "a.npy", content["logits"])
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npy").read_bytes())  # an array, not an archive of them
    diagnose_error("not a .npz file of plain arrays")
    (tmp_path / "a.safetensors").write_bytes(b"\x09" * 50)
    diagnose_error("not a .safetensors file", "a.safetensors")
    save_file({"logits": torch.ones(2, 3, 4)}, tmp_path / "a.safetensors")
    diagnose_error("it has no `target`", "a.safetensors")
    np.savez(tmp_path / "a.npz", predictions=content["logits"])
    diagnose_error("it has no `logits`")
    write_npz(logits=content["logits"][0])
    diagnose_error(r"Expected `logits` of shape \(K, N, C, \.\.\.\)")
    write_npz(target=content["target"].astype(float))
    diagnose_error("class indices of an integer type in `target`")
    write_npz(target=content["target"] + 4)
    diagnose_error(r"Expected class indices in \[0, 3\]")
    write_npz(logits=content["logits"].astype(complex))
    diagnose_error("`logits` of a floating-point type, but got torch.complex128")
    write_npz(class_names=np.arange(4))
    diagnose_error("`class_names` to be a sequence of strings")
    write_npz(class_names=np.array(["a", "b"]))
    diagnose_error("Expected 4 `class_names`, one for each class, but got 2")
    write_npz(logits=np.where(content["logits"] > 5, np.nan, content["logits"]))
    diagnose_error("Expected finite `logits`")
    write_npz(train_logits=content["train_logits"][:2])
    diagnose_error("Expected `train_logits` of 5 members and 4 classes")


# -- errors -----------------------------------------------------------------------------------------------------------


def test_argument_errors():
    logits, target = ensembles.healthy(50)
    with pytest.raises(ValueError, match="For one model, add the axis"):
        diagnose(logits[0], target)
    with pytest.raises(ValueError, match=r"of shape \(K, N, C\), but got \(5, 50, 4, 2\)"):
        diagnose(logits[..., None].expand(5, 50, 4, 2), target[:, None].expand(50, 2))
    with pytest.raises(TypeError, match="class indices in `target`"):
        diagnose(logits, logits[0].softmax(1))
    with pytest.raises(TypeError, match="`target` to be a tensor"):
        diagnose(logits, target.tolist())
    with pytest.raises(ValueError, match="both `train_logits` and `train_target`"):
        diagnose(logits, target, train_logits=logits)
    with pytest.raises(ValueError, match=r"`train_logits` of 5 members and 4 classes, but got shape \(3, 50, 4\)"):
        diagnose(logits, target, train_logits=logits[:3], train_target=target)
    with pytest.raises(ValueError, match="at least one sample"):
        diagnose(logits[:, :0], target[:0])
    with pytest.raises(ValueError, match="sum to 1"):
        diagnose(logits, target, member_weights=[1.0] * 5)
    with pytest.raises(TypeError, match="`class_names` to be a sequence of strings"):
        diagnose(logits, target, class_names="abcd")
    logits[3, 7, 1] = torch.nan
    with pytest.raises(ValueError, match="finite `logits`, but those of member 3"):
        diagnose(logits, target)
