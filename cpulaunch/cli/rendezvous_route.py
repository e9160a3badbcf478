"""The one fact of a job of several hosts that the machine's files do not tell: the way to the others."""

from __future__ import annotations

from cpulaunch.records.errors import ProbeError
from cpulaunch.records.record import replace
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from cpulaunch.records.settings import Settings

NAME_PATIENCE_SECONDS = 60.0
"""How long a host name may take to appear, unless --rdzv-conf join_timeout is shorter."""


def with_route(request: LaunchRequest, *, wait_for_dns: bool, notify: Callable[[str], None]) -> LaunchRequest:
    """The request with the interface and the address on the way to where the hosts meet, where both can be told.

    Raises: ProbeError or UsageError if the host name cannot be used. Without `wait_for_dns`, a name that does not
    resolve is only a warning: the plan may be made on another machine.
    """
    from cpulaunch.system.routes import route_to

    endpoint, source = _meeting_point(request.settings)
    if dict(request.settings.rdzv_conf).get("store_type") == "file":
        return request
    try:
        patience = _patience(request) if wait_for_dns else 0.0
        route = route_to(endpoint, source=source, patience_seconds=patience, notify=notify)
    except ProbeError as error:
        if wait_for_dns:
            raise
        warning = f"{error.what}: {error.value} ({error.source}); the network interface is not chosen"
        return replace(request, warnings=(*request.warnings, warning))
    if route is None:
        return request
    return replace(request, endpoint_interface=route.interface, endpoint_address=route.address)


def _meeting_point(settings: Settings) -> tuple[str, str]:
    """Where several hosts meet, HOST[:PORT], and the option that says so."""
    if settings.rdzv_endpoint:
        return settings.rdzv_endpoint, "--rdzv-endpoint"
    return settings.master_addr or "localhost", "--master-addr"


def _patience(request: LaunchRequest) -> float:
    asked = dict(request.settings.rdzv_conf).get("join_timeout", "")
    return min(NAME_PATIENCE_SECONDS, float(asked)) if asked.isdigit() else NAME_PATIENCE_SECONDS
