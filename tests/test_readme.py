"""The README's example runs as it stands, and its numbers are those of the kept notebooks and the model's card."""

import functools
import json
import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import headwater as hw
from headwater.heads.categories import CATEGORIES
from headwater.models.packaged import packaged_file

README = Path(__file__).parents[1] / "README.md"
NOTEBOOK_11 = README.parent / "runs" / "capital"
"""Where notebook 11 keeps the evidence that the README's example computes too: after this test it reads that."""
NUMBER = r"([+−-]?\d+(?:\.\d+)?)"


def readme() -> str:
    """Its text in one line, with plain minus signs."""
    return " ".join(README.read_text(encoding="utf-8").split()).replace("−", "-")


def printed(name: str) -> str:
    """What the kept notebook printed."""
    (file,) = (README.parent / "notebooks").glob(f"{name}*.ipynb")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


def numbers(pattern: str, text: str) -> list[tuple[float, ...]]:
    """The numbers at every place where the pattern, with # for a number, stands in the text."""
    found = re.findall(re.escape(pattern).replace("\\#", NUMBER).replace("\\ ", " "), text)
    return [tuple(map(float, match if isinstance(match, tuple) else (match,))) for match in found]


@pytest.mark.real
@pytest.mark.skipif(packaged_file("smollm2") is None, reason="needs SmolLM2's package: make test-real-smollm2")
def test_the_example_in_the_readme_runs_on_smollm2_and_prints_what_the_readme_says(monkeypatch):
    shutil.rmtree(NOTEBOOK_11, ignore_errors=True)
    monkeypatch.setattr(hw, "evidence", functools.partial(hw.evidence, out=NOTEBOOK_11))
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    plt.close("all")
    assert names["found"].verdict in readme()


def test_what_the_readme_says_of_pathways_is_what_notebook_4_printed():
    found = printed("04_").replace("−", "-")
    exact = numbers("knockout of the exact tokens flips # %", found)
    random = numbers("as many random question tokens: # %", found)
    modes = re.findall(
        rf"as published, ΔP at l\* is {NUMBER} points .*? for {NUMBER} Q-anchored and {NUMBER} points", found
    )
    assert len(exact) == len(random) == len(modes) == 4
    gaps = [round(float(a) - float(q)) for q, _, a in modes]
    text = readme()
    assert f"flips {min(exact)[0]:.0f} to {max(exact)[0]:.0f} % of its predictions" in text
    assert f"random words {min(random)[0]:.0f} to {max(random)[0]:.0f} %" in text
    assert f"lie {min(gaps)} to {max(gaps)} points of ΔP apart" in text
    assert found.count("splitting by the flip alone produces a gap of this size") == 4
    (verdict,) = re.findall(r"Two modes survive the controls on (\w+)", found)
    assert f"tested within each relation, two modes survive the controls on {verdict}" in text


def test_what_the_readme_says_of_memorization_is_what_notebook_6_printed():
    found = printed("06_")
    ((known,),) = numbers("min_k_0.2: Spearman #", found)
    ((calibrated,),) = numbers("min_k++_0.2: Spearman #", found)
    assert f"(Spearman {known:.2f})" in readme()
    assert f"Min-K%++ does not ({calibrated:.2f})" in readme()


def test_what_the_readme_says_of_the_embedded_model_is_on_its_card():
    card = (README.parent / "src" / "headwater" / "world" / "CARD.md").read_text(encoding="utf-8")
    rarest, often = (re.search(rf"popularity quarter {n} [^|]*\| {NUMBER} %", card)[1] for n in (1, 4))
    wrong, questions = re.search(rf"\*\*wrong, of all questions\*\* \| \*\*{NUMBER} %\*\* of ([\d,]+)", card).groups()
    probe = re.search(rf"before_answer, layer 0 \| {NUMBER},", card)[1]
    baseline = re.search(rf"\| baseline \| {NUMBER},", card)[1]
    kept, by_chance = re.search(rf"seed 0 \(shipped\): {NUMBER} against {NUMBER} on average", card).groups()
    text = readme()
    assert f"{often} % of the questions on the most frequent quarter of the facts, {float(rarest):.0f} %" in text
    assert f"{float(wrong):.0f} % of all {questions} answers are wrong" in text
    assert f"(AUC {probe}; {baseline} for a baseline" in text
    assert f"{float(kept):.0%} stay right".replace("%", " %") in text
    assert f"and {float(by_chance):.0%} when as many random heads".replace("%", " %") in text
    labels = {name: int(n) for name, n in re.findall(r"labelled ([\w ]+?) \| (\d+) \|", card)}
    several = sum(n for name, n in labels.items() if name[0].isdigit())
    found = ", ".join(f"{labels[name]} {name}" for name in CATEGORIES if labels.get(name))
    assert f"{found}, {several} of several categories" in text
    assert f"{sum(labels.values()) - labels['unclassified']} of {sum(labels.values())} heads are classified" in text


def test_the_readme_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    assert not [line for line in lines if len(line) > 120]
