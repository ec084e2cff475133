"""The gateways that can be measured, in the order in which they are listed."""

from loadtest.bench.targets import envoy, haproxy, headrace_gateway, litellm, nginx, sglang_router, vllm_router
from loadtest.bench.targets.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        headrace_gateway.TARGET, headrace_gateway.COMPILED_TARGET, nginx.TARGET, haproxy.TARGET, envoy.TARGET,
        vllm_router.TARGET, sglang_router.TARGET, litellm.TARGET)
}
