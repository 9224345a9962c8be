"""Run the tests nearest to what was changed, for a minute of two cores: `python tools/quick.py [ROOM]` (`make quick`).

1. Changed is what differs from git's HEAD; or with ROOM, a folder of src/headwater, all modules in it.
2. A test file counts as often as it names a changed module, or takes from `hw` what that module offers; a changed test
   file comes first. Where no file names them, their room counts. Where nothing is changed, some whole runs are chosen.
3. The files that count most for their length are shared out to two processes. Each begins tests until it has taken 42
   seconds of processor time; how many were skipped then is said.
"""

import re
import subprocess
import sys
from pathlib import Path

from headwater.rooms import homes_of

ROOT = Path(__file__).resolve().parents[1]
SECONDS, MOST_FILES = 42, 10
WHOLE_RUNS = ["screen_pairs", "whole_runs", "planted_heads", "sweep_planted", "edges_planted", "architecture"]


def changed() -> list[str]:
    """The files that differ from HEAD, also new ones."""
    commands = (["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"])
    return [name for one in commands for name in subprocess.check_output(one, cwd=ROOT, text=True).splitlines()]


def nearest(files: list[str]) -> list[str]:
    """The test files that name what is in files, those that name it most often for their length first."""
    paths = [Path(name.removeprefix("src/")).with_suffix("").parts for name in files if name.endswith(".py")]
    modules = [".".join(path).removesuffix(".__init__") for path in paths if path[0] in ("headwater", "tests")]
    rooms = sorted({name.rpartition(".")[0] for name in modules if name.count(".") > 1})
    texts = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in sorted(ROOT.glob("tests/test_*.py"))}
    for named in (modules, rooms):
        offered = [name for name, home in homes_of("headwater").items() if home in named]
        here = [re.escape(name).replace(r"\.", r"(?:\.| import )") for name in named]
        words = re.compile("|".join([*here, *(rf"hw\.{name}\b" for name in offered)]) or "(?!)")
        counts = {file: len(words.findall(text)) / len(text) + (file in files) for file, text in texts.items()}
        if any(counts.values()):
            break
    return sorted((file for file in texts if counts[file]), key=lambda file: -counts[file])[:MOST_FILES]


def main() -> int:
    """Choose and run."""
    room = ROOT / "src" / "headwater" / (sys.argv[1] if len(sys.argv) > 1 else "")
    if not room.is_dir():
        sys.exit(f"{sys.argv[1]!r} is no folder of src/headwater: give one, as in make quick ROOM=patching.")
    files = [str(file.relative_to(ROOT)) for file in room.rglob("*.py")] if len(sys.argv) > 1 else changed()
    tests = nearest(files) or [f"tests/test_{name}.py" for name in WHOLE_RUNS]
    print(f"{len(files)} files are changed or in the room; of {len(tests)} test files:", *tests, flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "--seconds", str(SECONDS)]
    halves = [half for half in (tests[::2], tests[1::2]) if half]
    running = [subprocess.Popen([*command, *half], cwd=ROOT, stdout=subprocess.PIPE, text=True) for half in halves]
    for one in running:
        print(one.communicate()[0], flush=True)
    return int(any(one.returncode for one in running))


if __name__ == "__main__":
    sys.exit(main())
