"""Write the suite's README: what each relation holds, and how much of it survives given tokenizers.

python tools/suite_readme.py GPT-2=FOLDER Pythia=FOLDER
"""

import argparse
import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from headwater.heads.relations import load_relations, relation_coverage

SUITE = Path(__file__).parents[1] / "src" / "headwater" / "heads" / "suite"
HEAD = """# The relation suite

{count} relations with {pairs:,} pairs, gathered for headwater; each file states its provenance and licence. The lists
and the script that made them are in `tools/gathered` and `tools/gather_relations.py`. Every word is a single word in
NFC; a source comes once, with all its accepted targets; no pair maps a word to itself, copying aside.

- By hand: facts, word pairs, translations, released under CC0.
- lemminflect 0.2.3 (MIT): inflected forms, with corrections by hand.
- wordfreq 3.1 (Apache-2.0): which of our words are frequent; none of its data is in the files.
- CLDR through babel 2.18 (Unicode-3.0): names of countries, languages, months and days in the translations.

Facts are as of 2025, sources are in code-point order, and the first target is the usual one. A listed target
is right, though others may be too (a river's further countries, a word's further synonyms).

Single-token pairs (a leading space before each word), measured with `tools/suite_readme.py`. A relation needs 30.
"""


def main() -> None:
    """Measure the tokenizers named on the command line and write the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizers", nargs="+", metavar="NAME=FOLDER")
    folders = dict(argument.split("=", 1) for argument in parser.parse_args().tokenizers)
    relations = sorted(load_relations(), key=lambda relation: (relation.category, relation.name))
    kept = {}
    for name, folder in folders.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
        kept[name] = relation_coverage(relations, tokenizer)["kept"].tolist()
    lines = [HEAD.format(count=len(relations), pairs=sum(len(relation.pairs) for relation in relations))]
    lines.append("| category | relation | what | pairs | " + " | ".join(kept) + " |")
    lines.append("|---|---|---|---|" + "---|" * len(kept))
    for row, relation in enumerate(relations):
        what = json.loads((SUITE / f"{relation.name}.json").read_text(encoding="utf-8"))["description"]
        cells = [
            relation.category,
            relation.name,
            what,
            len(relation.pairs),
            *(counts[row] for counts in kept.values()),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    short = {name: sum(count < 30 for count in counts) for name, counts in kept.items()}
    lines.append("\nFewer than 30: " + "; ".join(f"{count} relations on {name}" for name, count in short.items()) + ".")
    (SUITE / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
