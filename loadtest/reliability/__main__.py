"""`python -m loadtest.reliability [B C …] [--size ci|long] [--json]`."""

import argparse

from loadtest.reliability.measured import Size
from loadtest.reliability.run import FIGURES, run_reliability

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m loadtest.reliability", description="Reliability figures.")
    parser.add_argument("figures", nargs="*", help=f"of {', '.join(FIGURES)}; all by default")
    parser.add_argument("--size", type=Size, choices=list(Size), default=Size.CI)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each value")
    given = parser.parse_args()
    raise SystemExit(run_reliability(given.figures, size=given.size, as_json=given.json))
