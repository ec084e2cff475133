"""Which lender a file asks for: the router that it names, or the allocator's own word."""

from allocator.execution.engine import ExecutionEngine
from allocator.lender.router_lender import RouterAdmin, RouterLender
from allocator.service.config import Declared
from allocator.service.lender import Lender
from allocator.service.managed import ManagedLender
from allocator.service.replicas import ReplicaEngines


def lender_for(engine: ExecutionEngine, declared: Declared) -> Lender:
    """The lender of a term. With a router, it says what can be spared, and the allocator keeps the engines."""
    router = declared.config.router
    if router is None:
        return ManagedLender(engine, declared)
    return RouterLender(RouterAdmin(router.url), ReplicaEngines(engine, declared), declared, hold_s=router.hold_s)
