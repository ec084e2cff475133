"""One locust user that sends a block of `schedule` through one gateway, each request at its time: an open loop.

    locust -f loadtest/live/locustfile.py --headless -u 1 --host URL --schedule FILE --records FILE --drain-s 20

Each answer becomes a line of `--records`: the number of its arrival and its `StreamRecord`. What is still open when the
drain time is over is closed, and has no line.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import User, events, task
from locust.exception import StopUser

from loadtest.live.schedule import parse_schedule
from loadtest.openai_stream import Ask, Endpoint, StreamFault, stream_chat
from loadtest.traffic import Arrival

LEAD_S = 0.2
"""Between the reading of the file and the start of the block, so that the first arrivals are not late."""


def add_options(parser: Any, **_: Any) -> None:
    """What this file adds to locust's own options."""
    group = parser.add_argument_group("a block of arrivals")
    group.add_argument("--schedule", required=True, help="file of arrivals and prompts")
    group.add_argument("--records", required=True, help="write each answer to this file, a line of JSON each")
    group.add_argument("--drain-s", type=float, default=20.0, help="how long answers may take after the last arrival")


hooks: Any = events  # locust types its hooks loosely
hooks.init_command_line_parser.add_listener(add_options)


class BlockUser(User):
    """All callers of the block in one: requests overlap as the schedule wants."""

    @task
    def follow_schedule(self) -> None:
        """Send the block, wait for the answers, end the run."""
        options = self.environment.parsed_options
        assert options is not None
        endpoint = Endpoint.parse(self.environment.host or "")
        model, asks = parse_schedule(Path(options.schedule).read_text(encoding="utf-8"))
        started_s = time.monotonic() + LEAD_S
        still_open = Group()
        # The file is closed, hence complete, before locust is told to end.
        with Path(options.records).open("w", encoding="utf-8") as records:
            def send(number: int, arrival: Arrival, prompt: str) -> None:
                ask = Ask(started_s + arrival.at_s, model, prompt, arrival.prompt_tokens, arrival.max_tokens,
                          arrival.latency_class)
                record = stream_chat(endpoint, ask)
                records.write(json.dumps({"number": number, "record": asdict(record)}) + "\n")
                self.environment.events.request.fire(
                    request_type="chat", name=arrival.latency_class or "", response_time=record.e2e_s * 1000,
                    response_length=record.tokens, context={},
                    exception=StreamFault(record.failure, record.detail) if record.failure else None)

            for number, (arrival, prompt) in enumerate(asks):
                gevent.sleep(max(0.0, started_s + arrival.at_s - time.monotonic()))
                still_open.spawn(send, number, arrival, prompt)
            still_open.join(timeout=options.drain_s)
            still_open.kill()
        if self.environment.runner:
            gevent.spawn(self.environment.runner.quit)
        raise StopUser
