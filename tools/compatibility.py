"""Write the tables of models and of Pythons into docs/compatibility.md, from what the tests say of each.

python tools/compatibility.py          # the page
python tools/compatibility.py run      # first the tests of the table of models on this Python, and what came of them
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.compatibility import LANE, page, remember  # noqa: E402


def run() -> None:
    """Run the tests of the table on this Python and write down what passed.

    Raises:
        SystemExit: a test failed; nothing is written.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in LANE)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(ran.stdout[-2000:])
    passed = re.search(r"(\d+) passed", ran.stdout)
    if ran.returncode or passed is None:
        sys.exit(f"pytest ended with {ran.returncode}; nothing was written down.")
    remember(int(passed[1]))


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run()
    file = ROOT / "docs" / "compatibility.md"
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
