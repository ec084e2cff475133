"""What the bench needs to know of a target. One module a target; each is pure text: a command line and its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MODEL = "bench-model"
"""The name that clients use and that the mock engine serves."""
HOLDS_OPEN_S = 3600
"""For every timeout that a target wants: none may end a run."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a target is to be set up."""

    folder: str
    port: int
    side_port: int
    """A second free port, for targets that open one for metrics or operators."""
    engine_ports: tuple[int, ...]
    key: str
    """The API key that every request carries."""

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """Base addresses of the mock's ports."""
        return tuple(f"http://127.0.0.1:{port}" for port in self.engine_ports)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a target in `Site.folder`."""

    command: tuple[str, ...]
    """Without the program itself."""
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway that can be measured."""

    name: str
    program: str
    """Name of the executable, looked for in the given folders, beside our own, and on the path."""
    install: str
    """What makes it present."""
    launch: Callable[[Site], Launch]
    version_arguments: tuple[str, ...] = ("--version",)
    distribution: str = ""
    """The Python distribution whose version counts, where the program does not tell its own."""
    start_limit_s: float = 20.0
    by_interpreter: tuple[str, ...] | None = None
    """`python` with these arguments is the program, and `program` is only its name."""
    form: Callable[[], str | None] = lambda: ""
    """Of such a program: how its code runs, to stand beside its version; `None` where it cannot run so."""
