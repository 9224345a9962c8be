"""Write the table of models into docs/compatibility.md, from what the tests say of each."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.compatibility import page  # noqa: E402

if __name__ == "__main__":
    file = ROOT / "docs" / "compatibility.md"
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
