"""The sections of an allocator file, one class each. `docs/allocator-service.md` has a row for every setting."""

from datetime import date, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from allocator.model.inventory import Backend, BackendState, Node, Supply, devices_of
from allocator.model.pools import Currency, Pool, PoolKind, Queue, Quota, Rules
from allocator.service.fields import Amount, Count, Seconds, SecondsFromZero, Word
from settings.fields import BaseUrl, Host, Labels, Name, Port, Section, Text, VariableName, wrong

_RULES = Rules()
Argv = Annotated[tuple[Word, ...], Field(min_length=1, max_length=1000, strict=False)]


class ListenSection(Section):
    """Where people and programs talk to the allocator."""

    host: Host = Field(default="127.0.0.1", description="Address that the API binds.", examples=["127.0.0.1"])
    port: Port = Field(default=8082, description="TCP port; 0 takes a free one.", examples=[8082])
    token_env: VariableName | None = Field(
        default=None, description="Environment variable with the token that every request must carry; needed beyond "
                                  "loopback, for whoever may submit a job may run programs.",
        examples=["HEADRACE_ALLOCATOR_TOKEN"])


class StoreSection(Section):
    """Where the journal is kept."""

    path: Text | None = Field(
        default=None, description="SQLite file, beside this file unless absolute; left out: `allocator.db` in `state`.",
        examples=["/var/lib/headrace/allocator.db"])
    url_env: VariableName | None = Field(
        default=None, description="Environment variable with the address of a PostgreSQL database instead, for two "
                                  "allocators.", examples=["HEADRACE_DATABASE_URL"])
    snapshot_every: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=500, description="Events between two snapshots of the world.", examples=[500])
    lease_s: Annotated[float, Field(ge=0.5, le=300)] = Field(
        default=5.0, description="A leader that shows no pulse for so long is succeeded.", examples=[5.0])


class ExecutionSection(Section):
    """What runs the jobs."""

    engine: Literal["local"] = Field(
        default="local", description="`local`: processes on this machine.", examples=["local"])
    kill_margin_s: SecondsFromZero = Field(
        default=0.5, description="Time between the engine's SIGKILL and a deadline.", examples=[0.5])
    start_timeout_s: Seconds = Field(
        default=20.0, description="A gang that is not up by then was not started.", examples=[20.0])
    poll_s: Annotated[float, Field(ge=0.02, le=10)] = Field(
        default=0.1, description="How often is looked while something is on its way.", examples=[0.1])
    cgroups: bool = Field(
        default=False, description="Use the control group that systemd delegates (`Delegate=yes`).", examples=[True])
    keep_runs: Count = Field(
        default=50, description="Runs that are over of which the folders with their output are kept.", examples=[50])
    probe: Argv | None = Field(
        default=None, description="Command that judges devices on their way home: gets their names, exits with 0.",
        examples=[["/usr/local/bin/check-card"]])
    probe_timeout_s: Seconds = Field(
        default=30.0, description="A probe that takes longer has failed.", examples=[30.0])


class CardSection(Section):
    """What a card costs."""

    name: Name = Field(description="As in the coefficients.", examples=["v100"])
    purchase_price: Amount = Field(default=0.0, description="Of one device.", examples=[9000.0])
    depreciation_years: Annotated[float, Field(gt=0, le=50)] = Field(
        default=4.0, description="Over which the purchase is written off.", examples=[4.0])
    power_w: Amount = Field(default=0.0, description="Of one device, cooling included.", examples=[400.0])
    price_per_kwh: Amount = Field(default=0.0, description="Of electricity.", examples=[0.12])

    @property
    def per_hour(self) -> float:
        """Money for one device and hour."""
        bought = self.purchase_price / (self.depreciation_years * 365.25 * 24.0)
        return bought + self.power_w / 1000.0 * self.price_per_kwh


class NodeSection(Section):
    """One machine with devices of one card type."""

    name: Name = Field(description="Its devices are called `name:0`, `name:1`, …", examples=["gpu-07"])
    card: Name = Field(description="Card type, as in the coefficients.", examples=["v100"])
    devices: Annotated[int, Field(ge=1, le=1024)] = Field(description="How many.", examples=[8])
    memory_gb: Annotated[float, Field(gt=0, le=100_000)] = Field(
        default=80.0, description="Of one device.", examples=[16.0])
    island_devices: Count = Field(
        default=0, description="Devices of one NVLink domain or HCCS ring; 0: the whole node.", examples=[4])
    leaf: str = Field(default="", description="Leaf switch.", examples=["leaf-2"])
    pod: str = Field(default="", description="Pod of leaf switches.", examples=["pod-1"])
    site: str = Field(default="", description="Where its data is near.", examples=["fra"])
    labels: Labels = Field(default={}, description="Pools select by these.", examples=[{"purpose": "training"}])
    vendor: Name = Field(
        default="cpu", description="How its devices are shown to a process; a row of execution/devices.py.",
        examples=["nvidia"])
    device_ids: Annotated[tuple[Text, ...], Field(max_length=1024, strict=False)] = Field(
        default=(), description="The vendor's own numbers or UUIDs, in order; left out: 0, 1, … (vendor cpu: names).",
        examples=[["0", "1"]])

    def node(self) -> Node:
        return Node(self.name, self.card, self.devices, self.memory_gb, self.island_devices, self.leaf, self.pod,
                    self.site, dict(self.labels))

    def vendor_ids(self) -> tuple[str, ...]:
        """The vendor's id of each device, in order."""
        if self.device_ids:
            return self.device_ids
        names = devices_of(self.name, self.devices)
        return names if self.vendor == "cpu" else tuple(str(index) for index in range(self.devices))


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise wrong("must be a time such as `2027-01-01T00:00:00+00:00`, in quotes") from None
    if moment.tzinfo is None:
        raise wrong("must name its time zone, such as `+00:00` at the end")
    return text


Moment = Annotated[str, AfterValidator(_moment)]


def _date(text: str) -> str:
    try:
        date.fromisoformat(text)
    except ValueError:
        raise wrong("must be a date such as `2027-06-30`, in quotes") from None
    return text


Date = Annotated[str, AfterValidator(_date)]


class PoolSection(Section):
    """Devices of one purpose."""

    name: Name = Field(description="Name of the pool.", examples=["training"])
    kind: Literal["training", "inference", "enclave", "transitional"] = Field(
        description="What it is for.", examples=["training"])
    selector: Labels = Field(description="Labels that a node of it has.", examples=[{"purpose": "training"}])
    currency: Literal["cards", "units"] = Field(
        default="cards", description="What the quotas of its queues count: devices by card, or normalised units.",
        examples=["units"])
    reason: str = Field(default="", description="Of an enclave: why it stands apart.", examples=["patient data"])
    review_on: Date = Field(default="", description="Of an enclave: date at which that is asked again.",
                           examples=["2027-06-30"])
    starts_at: Moment | None = Field(default=None, description="Of a transitional pool.",
                                     examples=["2027-01-01T00:00:00+00:00"])
    ends_at: Moment | None = Field(default=None, description="Of a transitional pool.",
                                   examples=["2027-02-01T00:00:00+00:00"])
    then_pool: Name | None = Field(default=None, description="Of a transitional pool: where its nodes go at the end.",
                                   examples=["training"])
    keep_whole_nodes: Count = Field(
        default=0, description="Wholly free nodes of a card that small gangs leave whole.", examples=[1])

    def pool(self) -> Pool:
        return Pool(
            self.name, PoolKind(self.kind), dict(self.selector), Currency(self.currency), self.reason, self.review_on,
            _unix_s(self.starts_at), _unix_s(self.ends_at), self.then_pool, self.keep_whole_nodes)


def _unix_s(moment: str | None) -> float | None:
    return None if moment is None else datetime.fromisoformat(moment).timestamp()


class QuotaSection(Section):
    """A queue's promise for one card, or in units."""

    nominal: Amount = Field(description="What it is guaranteed.", examples=[8.0])
    lending_limit: Amount | None = Field(
        default=None, description="How much of it others may use while it is idle; left out: all.", examples=[4.0])
    borrowing_limit: Amount | None = Field(
        default=None, description="How much beyond it the queue may use; left out: all there is.", examples=[8.0])


class QueueSection(Section):
    """Where jobs wait."""

    name: Name = Field(description="Name of the queue.", examples=["research"])
    parent: Name = Field(description="A pool, or another queue.", examples=["training"])
    weight: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=1.0, description="Share of what is left over; 0: only what nobody else wants.", examples=[2.0])
    quotas: dict[str, QuotaSection] = Field(
        default={}, description="By card, or `units`.", examples=[{"v100": {"nominal": 8}}])

    def queue(self) -> Queue:
        return Queue(self.name, self.parent, {
            key: Quota(quota.nominal, quota.lending_limit, quota.borrowing_limit)
            for key, quota in self.quotas.items()}, self.weight)


class BackendSection(Section):
    """An inference replica: the smallest thing that is lent."""

    name: Name = Field(description="As in the router's fleet file.", examples=["chat-v100-0"])
    pool: Name = Field(description="Its inference pool.", examples=["inference"])
    devices: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] = Field(
        description="The devices under it, all of one card.", examples=[["gpu-07:0", "gpu-07:1"]])
    reload_s: SecondsFromZero = Field(
        default=60.0, description="Stop, load and warm-up: until it serves again once it has its devices back.",
        examples=[45.0])
    command: Argv | None = Field(
        default=None, description="Starts its engine; the allocator then stops it for a loan and starts it after. Left "
                                  "out: somebody else does that.", examples=[["vllm", "serve", "Qwen/Qwen3-32B"]])

    def backend(self, card: str) -> Backend:
        return Backend(self.name, self.pool, card, self.devices, BackendState.SERVING, self.reload_s)


class RouterSection(Section):
    """The router that serves the backends of this file: it says which can be spared, and lets them go."""

    url: BaseUrl = Field(description="Its admin listener.", examples=["http://127.0.0.1:9090"])
    hold_s: SecondsFromZero = Field(
        default=5.0, description="A surplus or a want that it does not publish for so long is none.", examples=[5.0])


class SupplySection(Section):
    """What an inference pool can do without, until somebody who knows better says so. With a router: at the most."""

    pool: Name = Field(description="An inference pool.", examples=["inference"])
    card: Name = Field(description="Card type.", examples=["v100"])
    lendable: Count = Field(description="Whole replicas that may be lent, lent ones included.", examples=[2])
    spare: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = Field(
        description="Whole replicas that may stay away; fewer than are away are recalled.", examples=[2])

    def supply(self) -> Supply:
        return Supply(self.pool, self.card, self.lendable, self.spare)


class RulesSection(Section):
    """Times and thresholds of the decisions."""

    tick_s: Annotated[float, Field(ge=0.05, le=60)] = Field(
        default=_RULES.tick_s, description="The planner runs at least this often.", examples=[1.0])
    grace_s: Seconds = Field(
        default=_RULES.grace_s, description="Notice that a stopped job gets, and that a loan promises.",
        examples=[60.0])
    kill_margin_s: SecondsFromZero = Field(
        default=_RULES.kill_margin_s, description="A job that still stands this long before its deadline is killed; "
                                                  "must be less than `grace_s`.",
        examples=[5.0])
    promised_min_s: Seconds = Field(
        default=_RULES.promised_min_s, description="How long a loan is meant to last.", examples=[1800.0])
    offer_ttl_s: Seconds = Field(
        default=_RULES.offer_ttl_s, description="An offer that came to nothing by then is withdrawn.", examples=[300.0])
    surplus_hold_s: SecondsFromZero = Field(
        default=_RULES.surplus_hold_s, description="A surplus is offered once it has held this long.", examples=[120.0])
    recall_keep_s: SecondsFromZero = Field(
        default=_RULES.recall_keep_s, description="What was recalled by hand is not lent again for so long, unless "
                                                  "somebody says what can be spared.", examples=[1800.0])
    supply_fresh_s: Seconds = Field(
        default=_RULES.supply_fresh_s, description="Older figures of a lender offer nothing.", examples=[60.0])
    idle_return_s: SecondsFromZero = Field(
        default=_RULES.idle_return_s, description="A loan that nobody used for so long goes home.", examples=[30.0])
    quarantine_after_s: SecondsFromZero = Field(
        default=_RULES.quarantine_after_s, description="An overdue loan not proven idle by then is written off.",
        examples=[120.0])
    reservations: Count = Field(
        default=_RULES.reservations, description="Waiting gangs with a reservation, by pool and card: 1 is EASY, 0 "
                                                 "best effort, many conservative.", examples=[1])
    default_estimate_s: Seconds = Field(
        default=_RULES.default_estimate_s, description="Assumed for a job that gives no estimate.", examples=[86400.0])
    min_run_s: SecondsFromZero = Field(
        default=_RULES.min_run_s, description="A younger run is not reclaimed for another queue.", examples=[600.0])
    max_recalls: Count = Field(
        default=_RULES.max_recalls, description="A job recalled so often waits for devices that cannot be recalled.",
        examples=[3])
    min_loan_worth: Annotated[float, Field(ge=0, le=1)] = Field(
        default=_RULES.min_loan_worth, description="Least share of a loan that must be work and not restart.",
        examples=[0.5])
    patience: Annotated[float, Field(ge=1, le=100)] = Field(
        default=_RULES.patience, description="A faster card is waited for if that is done so many times sooner.",
        examples=[1.25])
    max_restarts: Count = Field(
        default=_RULES.max_restarts, description="Crashes of a job before it is given up.", examples=[3])
    restart_pause_s: SecondsFromZero = Field(
        default=_RULES.restart_pause_s, description="Between a crash of a job and its next try; twice as long after "
                                                    "each further one.", examples=[10.0])
    restart_pause_max_s: SecondsFromZero = Field(
        default=_RULES.restart_pause_max_s, description="No pause after a crash is longer.", examples=[600.0])
    warn_before_s: SecondsFromZero = Field(
        default=_RULES.warn_before_s, description="Notice before a transitional pool ends.", examples=[86400.0])
    site_gbps: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default=_RULES.site_gbps, description="Bandwidth between sites where no link is declared.", examples=[10.0])

    def rules(self) -> Rules:
        return Rules(**self.model_dump())


class LinkSection(Section):
    """Bandwidth from one site to another."""

    source: Text = Field(description="A site.", examples=["fra"])
    target: Text = Field(description="Another.", examples=["ams"])
    gbps: Annotated[float, Field(gt=0, le=1e6)] = Field(description="Gigabits a second.", examples=[100.0])
