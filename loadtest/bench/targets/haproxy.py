"""HAProxy with one thread. Without `http-no-delay` it waits for more of a stream before it sends."""

from loadtest.bench.targets.target import HOLDS_OPEN_S, Launch, Site, Target

_CONFIG = """\
global
  nbthread 1
  maxconn 8000
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client {timeout}s
  timeout server {timeout}s
  timeout http-keep-alive {timeout}s
frontend gateway
  bind 127.0.0.1:{port} backlog 4096
  default_backend engines
backend engines
  balance roundrobin
{servers}
"""


def launch(site: Site) -> Launch:
    """HAProxy in the foreground, without a master process."""
    servers = "\n".join(f"  server engine{number} 127.0.0.1:{port} pool-max-conn 1024"
                        for number, port in enumerate(site.engine_ports))
    config = _CONFIG.format(port=site.port, servers=servers, timeout=HOLDS_OPEN_S)
    return Launch(("-db", "-q", "-f", f"{site.folder}/haproxy.cfg"), {"haproxy.cfg": config})


TARGET = Target("haproxy", "haproxy", "apt-get install haproxy", launch, version_arguments=("-v",))
