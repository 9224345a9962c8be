"""`python -m headwater`: the same as the `headwater` command.

`accelerate launch -m headwater ...` (or `torchrun`) starts it several times: then the processes share the work of a run
with `--out` (`headwater.runs.folder`); only the main one draws progress bars and prints results.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    """Join the other processes where there are any, and run the command line."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _run()
        return
    leave = _join()
    try:
        _run()
    finally:
        leave()


def _run() -> None:
    from headwater.cli import main as run

    run()


def _join() -> Callable[[], None]:
    if os.environ.get("RANK", "0") != "0":
        os.environ["TQDM_DISABLE"] = "1"
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    import torch
    from accelerate import PartialState

    leave: Callable[[], None] = PartialState(cpu=not torch.cuda.is_available()).destroy_process_group
    return leave


if __name__ == "__main__":
    main()
