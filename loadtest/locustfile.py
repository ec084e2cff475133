"""Locust users that stream chat completions on a schedule of their own: an open loop.

    locust -f loadtest/locustfile.py --headless -u 20 -r 20 --host http://127.0.0.1:8080 --model smollm2-135m-instruct

Each user follows a seeded Poisson schedule and sends every request at its time, whether or not the ones before it have
been answered, so a backend that freezes meets the same arrivals as one that does not. Times are taken from the intended
start (`openai_stream`) and reported as `ttft`, `inter_token` (one event a gap) and `e2e`; failures count under `e2e`.
`--records FILE` keeps each request as a line of JSON: that is what `headrace loadtest` judges, exact to the request.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from random import Random
from typing import Any, TextIO

import gevent
from gevent.pool import Group
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.openai_stream import Ask, Endpoint, Patience, StreamFault, StreamRecord, stream_chat
from loadtest.traffic import (
    AZURE_CONV_OUTPUTS,
    AZURE_CONV_PROMPTS,
    Arrival,
    Lengths,
    Traffic,
    arrivals,
    prompt_text,
    user_dice,
)


@events.init_command_line_parser.add_listener
def add_options(parser: Any, **_: Any) -> None:
    """What this file adds to locust's own options."""
    group = parser.add_argument_group("traffic of chat completions")
    group.add_argument("--model", default="smollm2-135m-instruct", help="the model to ask for")
    group.add_argument("--request-rate", type=float, default=4.0, help="requests a second over all users")
    group.add_argument("--arrivals-s", type=float, default=0.0, help="arrivals end after so many seconds (0: never)")
    group.add_argument("--drain-s", type=float, default=20.0, help="how long started requests may take after that")
    group.add_argument("--seed", type=int, default=1, help="same seed, same schedule and sizes")
    group.add_argument("--latency-classes", default="", help="header x-headrace-class by share: interactive=3,batch=1")
    for kind, lengths in (("prompt", AZURE_CONV_PROMPTS), ("output", AZURE_CONV_OUTPUTS)):
        group.add_argument(f"--{kind}-median", type=float, default=lengths.median_tokens, help=f"median {kind}, tokens")
        group.add_argument(f"--{kind}-cap", type=int, default=lengths.cap_tokens, help=f"longest {kind}, tokens")
    group.add_argument("--exact-tokens", action="store_true", help="fewer tokens than max_tokens are a failure")
    group.add_argument("--api-key-env", default="", help="environment variable that holds the API key")
    group.add_argument("--records", default="", help="write each request to this file, a line of JSON each")


def traffic_of(options: Any) -> Traffic:
    """The traffic of one user out of `options.num_users`."""
    return Traffic(
        rate_per_s=options.request_rate / max(1, options.num_users or 1),
        prompts=Lengths(options.prompt_median, AZURE_CONV_PROMPTS.spread, options.prompt_cap),
        outputs=Lengths(options.output_median, AZURE_CONV_OUTPUTS.spread, options.output_cap),
        classes=parse_classes(options.latency_classes),
    )


def parse_classes(text: str) -> Mapping[str, float]:
    """`interactive=3,batch=1` as shares by name."""
    pairs = (part.partition("=") for part in text.split(",") if part)
    return {name.strip(): float(share or 1) for name, _, share in pairs}


class Records:
    """The file that `--records` names, or nothing."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def open(self, path: str) -> None:
        self._file = open(path, "w", encoding="utf-8") if path else None  # noqa: SIM115 closed at quit

    def write(self, record: StreamRecord) -> None:
        if self._file:
            self._file.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


records = Records()


@events.init.add_listener
def open_records(environment: Environment, **_: Any) -> None:
    """Once per process, before the first user."""
    if environment.parsed_options:
        records.open(environment.parsed_options.records)


@events.quit.add_listener
def close_records(**_: Any) -> None:
    """After the last user."""
    records.close()


class ChatUser(User):
    """A share of the traffic. Its requests overlap as its schedule wants."""

    _numbers = count()
    _at_work = 0

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.options = options
        self.endpoint = Endpoint.parse(self.environment.host or self.host or "http://127.0.0.1:8080")
        self.api_key = os.environ.get(options.api_key_env) if options.api_key_env else None
        self.dice = user_dice(options.seed, next(ChatUser._numbers))
        self.open_requests = Group()
        ChatUser._at_work += 1

    def on_stop(self) -> None:
        self.open_requests.kill()

    @task
    def follow_schedule(self) -> None:
        """Send what the schedule holds, wait for the answers, leave; the last to leave ends the run."""
        started_s = time.monotonic()
        prompts = Random(f"{started_s}")
        duration_s = self.options.arrivals_s or float("inf")
        for arrival in arrivals(traffic_of(self.options), self.dice, duration_s):
            intended_at_s = started_s + arrival.at_s
            # The text is made ahead of its time, so that making it delays no request.
            prompt = prompt_text(arrival.prompt_tokens, prompts)
            gevent.sleep(max(0.0, intended_at_s - time.monotonic()))
            self.open_requests.spawn(self.send, arrival, intended_at_s, prompt)
        gevent.sleep(max(0.0, started_s + duration_s - time.monotonic()))
        self.open_requests.join(timeout=self.options.drain_s)
        ChatUser._at_work -= 1
        if not ChatUser._at_work and self.environment.runner:
            gevent.spawn(self.environment.runner.quit)
        raise StopUser

    def send(self, arrival: Arrival, intended_at_s: float, prompt: str) -> None:
        """One request from start to report."""
        ask = Ask(intended_at_s, self.options.model, prompt, arrival.prompt_tokens, arrival.max_tokens,
                  arrival.latency_class, self.options.exact_tokens)
        record = stream_chat(self.endpoint, ask, patience=Patience(), api_key=self.api_key)
        records.write(record)
        self.report(record)

    def report(self, record: StreamRecord) -> None:
        """The same request for locust's own tables and charts."""
        def fire(name: str, seconds: float, error: Exception | None = None) -> None:
            self.environment.events.request.fire(
                request_type="chat", name=name, response_time=seconds * 1000, response_length=record.tokens,
                exception=error, context={"backend": record.backend, "latency_class": record.latency_class})

        if record.ttft_s is not None:
            fire("ttft", record.ttft_s)
        for gap_s in record.gaps_s:
            fire("inter_token", gap_s)
        fire("e2e", record.e2e_s, StreamFault(record.failure, record.detail) if record.failure else None)
