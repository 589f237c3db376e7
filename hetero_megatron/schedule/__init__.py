"""Pipeline schedules as data: generated, lowered to communication, validated, printed, timed. No torch."""

from hetero_megatron.schedule.actions import Action, Schedule
from hetero_megatron.schedule.generators import generate, schedule_names
from hetero_megatron.schedule.lower import lower
from hetero_megatron.schedule.show import format_grid
from hetero_megatron.schedule.simulate import Costs, Timed, Timeline, simulate
from hetero_megatron.schedule.validate import ScheduleError, in_flight, validate

__all__ = [
    "Action",
    "Costs",
    "Schedule",
    "ScheduleError",
    "Timed",
    "Timeline",
    "format_grid",
    "generate",
    "in_flight",
    "lower",
    "schedule_names",
    "simulate",
    "validate",
]
