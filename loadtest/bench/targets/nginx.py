"""nginx as a reverse proxy, tuned for streams: unbuffered, with kept connections to the engines."""

from loadtest.bench.targets.target import HOLDS_OPEN_S, Launch, Site, Target

# One process without a master: the same event loop as a worker, and nothing is left behind when it is killed.
# HTTP/1.1 with an empty Connection header is what lets upstream connections live; a body buffer above the largest
# request keeps bodies out of temporary files.
_CONFIG = """\
daemon off;
master_process off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log crit;
events {{ worker_connections 16384; multi_accept on; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  tcp_nodelay on;
  keepalive_requests 100000000;
  keepalive_timeout {timeout}s;
  client_max_body_size 64m;
  client_body_buffer_size 512k;
  upstream engines {{
{servers}
    keepalive 2048;
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_buffering off;
      proxy_read_timeout {timeout}s;
      proxy_send_timeout {timeout}s;
    }}
  }}
}}
"""


def launch(site: Site) -> Launch:
    """nginx in the foreground."""
    servers = "\n".join(f"    server 127.0.0.1:{port};" for port in site.engine_ports)
    config = _CONFIG.format(folder=site.folder, port=site.port, servers=servers, timeout=HOLDS_OPEN_S)
    return Launch(("-p", site.folder, "-e", f"{site.folder}/error.log", "-c", f"{site.folder}/nginx.conf"),
                  {"nginx.conf": config})


TARGET = Target("nginx", "nginx", "apt-get install nginx-light", launch, version_arguments=("-v",))
