"""What users would run instead of headwater, written plainly."""

import importlib.util


def installed(package: str) -> bool:
    """Whether a peer's package is here; one that is not is said to be missing, and its rows are left out."""
    here = importlib.util.find_spec(package) is not None
    if not here:
        print(f"{package} is not installed: its rows are left out (benchmarks/README.md says how to have them)")
    return here
