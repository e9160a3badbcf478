"""The network interface and address for a job of several hosts, taken from the route to its rendezvous."""

from __future__ import annotations

from cpulaunch.records.endpoint import is_file_store
from cpulaunch.records.errors import ProbeError
from cpulaunch.records.record import replace
from cpulaunch.records.request import LaunchRequest
from cpulaunch.system.root import natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from cpulaunch.records.settings import Settings

MAX_DNS_WAIT_SECONDS = 60.0
"""How long to wait for a host name to resolve, unless --rdzv-conf join_timeout is shorter."""


def with_route(request: LaunchRequest, *, wait_for_dns: bool, notify: Callable[[str], object]) -> LaunchRequest:
    """The request with this host's interface and address on the route to the rendezvous, if there is a route.

    Raises: ProbeError or UsageError if the host name cannot be used. Without `wait_for_dns`, a name that does not
    resolve is only a warning: the plan may be made on another machine.
    """
    from cpulaunch.system.routes import route_to

    endpoint, source = _rendezvous_address(request.settings)
    if is_file_store(dict(request.settings.rdzv_conf)):
        return request
    try:
        wait_seconds = _dns_wait_seconds(request) if wait_for_dns else 0.0
        route = route_to(endpoint, source=source, patience_seconds=wait_seconds, notify=notify)
    except ProbeError as error:
        if wait_for_dns:
            raise
        warning = f"{error.summary}; cpulaunch does not set a network interface"
        return replace(request, warnings=(*request.warnings, warning))
    if route is None:
        return request
    return replace(request, endpoint_interface=route.interface, endpoint_address=route.address)


def _rendezvous_address(settings: Settings) -> tuple[str, str]:
    """The rendezvous address HOST[:PORT], and the option that sets it."""
    if settings.rdzv_endpoint:
        return settings.rdzv_endpoint, "--rdzv-endpoint"
    return settings.master_addr or "localhost", "--master-addr"


def _dns_wait_seconds(request: LaunchRequest) -> float:
    join_timeout = natural(dict(request.settings.rdzv_conf).get("join_timeout", ""))
    return MAX_DNS_WAIT_SECONDS if join_timeout is None else min(MAX_DNS_WAIT_SECONDS, float(join_timeout))
