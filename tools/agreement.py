"""How often every extractor finds the words that question sets name themselves.

    python tools/agreement.py             the four sets of the embedded world, without a network
    python tools/agreement.py popqa.tsv   other files with subject and property

"model" is the embedded model, which has learnt no English: what it finds is the floor of an extractor by examples.
"""

import sys

import pandas as pd

import headwater as hw
from headwater.questions.extract import agreement

SETS = ("properties", "paraphrased", "natural", "multi_hop")
SAMPLE = 50
"""Questions of a set that the model is asked about, each up to five times."""


def main() -> None:
    """Print a table of all extractors and sets."""
    tables = []
    for name in sys.argv[1:] or SETS:
        tables.append(agreement(hw.load_questions(name), "rules"))
        asked = agreement(hw.load_questions(name, sample=SAMPLE), "model", model=hw.load())
        tables.append(asked[asked["extractor"] == "model"])
    with pd.option_context("display.width", 200, "display.max_columns", None):
        sys.stdout.write(f"{pd.concat(tables).round(3).to_string(index=False)}\n")


if __name__ == "__main__":
    main()
