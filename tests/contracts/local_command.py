"""`python -m tests.contracts.local_command FOLDER METHOD ARGUMENTS`: one call of a local engine in its own process.

Prints `begin` before it and `done` after it, then waits to be killed.
"""

import asyncio
import sys
import time
from pathlib import Path

from allocator.execution.local import LocalEngine
from tests.contracts.execution_engine import decode


def main() -> None:
    folder, method, arguments = sys.argv[1:]
    engine = LocalEngine(Path(folder), kill_margin_s=0.4)
    print("begin", flush=True)
    asyncio.run(getattr(engine, method)(*decode(arguments)))
    print("done", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
