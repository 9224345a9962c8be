"""Run benchmark suites: `python -m benchmarks [SUITE ...] [--device cpu] [--model NAME] [--json FILE] [--quick]`.

`python -m benchmarks table` writes the table of the results there are into README.md.
"""

import argparse
import traceback
from pathlib import Path

import torch

from benchmarks import (
    cache,
    circuits,
    collecting,
    edges,
    experiments,
    generation,
    growth,
    heads,
    heads_70b,
    knockout,
    likelihood,
    loading,
    patching,
    pathways,
    real,
    saliency,
    scaling,
    short_texts,
    table,
    toys,
)
from benchmarks.machine import measure_machine
from benchmarks.report import Row, describe, document

SUITES = {
    "heads": heads.run,
    "heads-70b": heads_70b.run,
    "knockout": knockout.run,
    "patching": patching.run,
    "experiments": experiments.run,
    "toys": toys.run,
    "saliency": saliency.run,
    "likelihood": likelihood.run,
    "scaling": scaling.run,
    "growth": growth.run,
    "cache": cache.run,
    "collecting": collecting.run,
    "generation": generation.run,
    "short-texts": short_texts.run,
    "loading": loading.run,
    "edges": edges.run,
    "circuits": circuits.run,
    "pathways": pathways.run,
    "real": real.run,
}

OF_A_MODEL = ("real", "knockout", "saliency", "circuits", "cache", "collecting", "generation", "growth")
"""Suites that take `--model`. What the others measure of a pretrained model is in `real`."""
QUICK = {"edges": edges.quick, "circuits": circuits.quick}
"""Suites that have small models too, to see whether they run and agree."""


def main(arguments: list[str] | None = None) -> None:
    """Run the suites asked for; the last line printed is one JSON document.

    The file is written after every row. A suite that fails is reported, the others run, and the exit status is 1.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all when none is named")
    parser.add_argument("--device", default="cpu", help="where headwater and the peer run: cpu, cuda, cuda:1")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the JSON document to this file, as it grows"
    )
    parser.add_argument("--quick", action="store_true", help="small models, where a suite has them: do they agree?")
    parser.add_argument(
        "--model",
        help=f"of {', '.join(OF_A_MODEL)}: a checkpoint folder, a GGUF file or a name, in float32; default: "
        "random weights, of `real` smollm2",
    )
    options = parser.parse_args(arguments)
    if options.suites == ["table"]:
        table.update(SUITES)
        return
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no CUDA device here")
    unknown = set(options.suites) - set(SUITES)
    if unknown:
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; choose of {', '.join(SUITES)}")
    if options.model and not 0 < len(options.suites) == len(set(options.suites).intersection(OF_A_MODEL)):
        parser.error(f"--model is of {', '.join(OF_A_MODEL)}; the others have random weights of a known shape")
    suites = options.suites or list(SUITES)
    taken = {"model": options.model} if options.model else {}
    rows: list[Row] = []
    failed: dict[str, str] = {}

    def written() -> str:
        text = document(suites, machine, rows, failed)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(text + "\n")
        return text

    with torch.inference_mode():
        machine = measure_machine(options.device)
        half = f", {machine.half_rate / 1e9:,.0f} in bfloat16" if machine.half_rate else ""
        print(
            f"{machine.device}, {machine.threads} threads: {machine.matrix_rate / 1e9:,.0f} GFLOP/s in float32 matrix "
            f"products{half}, {machine.bandwidth / 1e9:,.1f} GB/s",
            flush=True,
        )
        for suite in suites:
            try:
                for row in (QUICK if options.quick else SUITES).get(suite, SUITES[suite])(
                    machine, options.device, **taken
                ):
                    rows.append(row)
                    print(describe(row, machine), flush=True)
                    written()
            except Exception as error:
                traceback.print_exc()
                failed[suite] = f"{type(error).__name__}: {error}"
    print(written())
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
