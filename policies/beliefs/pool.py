"""All that is believed of the fleet as a whole: classes, lengths of answers, sessions, and what a request costs."""

from collections import OrderedDict

from policies.beliefs.backend import PoolTails
from policies.beliefs.classes import ClassBelief, ClassKey, class_key
from policies.beliefs.lengths import LengthBelief, LengthKey, length_key
from policies.facts import Budget, RequestFacts

MAX_CLASSES = 64
"""Callers may name budgets of their own; past this many, the rest of a latency class share one belief."""
MAX_SESSIONS = 50_000
PRICE_WEIGHT = 0.01


class PoolBelief:
    """Read by decisions through `FleetView.belief`, changed by its learner only."""

    __slots__ = ("classes", "lengths", "mean_price", "sessions", "tails")

    def __init__(self) -> None:
        self.tails = PoolTails()
        self.classes: dict[ClassKey, ClassBelief] = {}
        self.lengths: dict[LengthKey, LengthBelief] = {}
        self.mean_price: dict[str, float] = {}
        """What a request for a model costs, in the mean over the last hundred."""
        self.sessions: OrderedDict[str, str] = OrderedDict()
        """The backend that each session was last sent to; the oldest comes first."""

    def class_of(self, facts: RequestFacts) -> ClassBelief | None:
        """The request's class, or the one it shares; `None` where none like it was ever sent."""
        return self.classes.get(class_key(facts)) or self.classes.get(length_key(facts))

    def lengths_of(self, facts: RequestFacts) -> LengthBelief | None:
        """How long answers of the request's latency class are; `None` where none like it was ever sent."""
        return self.lengths.get(length_key(facts))

    def made_class_of(self, facts: RequestFacts) -> ClassBelief:
        """The request's class; made where it is new."""
        known = self.classes.get(class_key(facts))
        if known is not None:
            return known
        room = len(self.classes) < MAX_CLASSES
        key, budget = (class_key(facts), facts.budget) if room else (length_key(facts), Budget())
        known = self.classes.get(key)
        if known is None:
            known = self.classes[key] = ClassBelief(key, budget, self.made_lengths(length_key(facts)))
        return known

    def made_lengths(self, key: LengthKey) -> LengthBelief:
        """The lengths of that latency class; made where they are new."""
        known = self.lengths.get(key)
        if known is None:
            known = self.lengths[key] = LengthBelief()
        return known

    def sent(self, facts: RequestFacts, backend: str, price: float) -> None:
        """A request goes to `backend` at that price."""
        if 0.0 < price < float("inf"):
            mean = self.mean_price.get(facts.model, price)
            self.mean_price[facts.model] = mean + PRICE_WEIGHT * (price - mean)
        if facts.session_key is not None:
            self.sessions[facts.session_key] = backend
            self.sessions.move_to_end(facts.session_key)
            if len(self.sessions) > MAX_SESSIONS:
                self.sessions.popitem(last=False)
