"""Choice of a schedule: how the work of a term set is laid over warps, blocks and launches.

Pure functions of the problem; nothing here knows CUDA text (`jaxcg.codegen` follows what is decided here).
"""

from jaxcg.schedule.choose import choose
from jaxcg.schedule.plan import H200, SHARE, DeviceLimits, Group, Launch, Role, Schedule
from jaxcg.schedule.shared import SharedPlan, is_packed, plan_shared

__all__ = [
    "H200",
    "SHARE",
    "DeviceLimits",
    "Group",
    "Launch",
    "Role",
    "Schedule",
    "SharedPlan",
    "choose",
    "is_packed",
    "plan_shared",
]
