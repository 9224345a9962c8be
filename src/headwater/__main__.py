"""`python -m headwater`: the same as the `headwater` command.

`accelerate launch -m headwater ...` (or `torchrun`) starts it several times: then the processes share the work of a run
with `--out` (`headwater.runs.folder`); only the main process draws progress bars and prints results.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def main() -> None:
    """Join the other processes (if any), and run the command line."""
    with _joined() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else contextlib.nullcontext():
        from headwater.cli import main as run

        run()


@contextlib.contextmanager
def _joined() -> Iterator[None]:
    if os.environ.get("RANK", "0") != "0":
        os.environ["TQDM_DISABLE"] = "1"
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    try:
        yield
    finally:
        state.destroy_process_group()


if __name__ == "__main__":
    main()
