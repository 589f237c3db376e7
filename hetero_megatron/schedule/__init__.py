"""Pipeline schedules as data: generated, lowered to communication, validated, printed, timed. No torch."""

from hetero_megatron.schedule.actions import Action, Schedule
from hetero_megatron.schedule.collectives import validate_collectives
from hetero_megatron.schedule.generators import generate, schedule_names
from hetero_megatron.schedule.held import Held, held_states, in_flight
from hetero_megatron.schedule.lower import lower, lowered, with_synchronisation
from hetero_megatron.schedule.messages import receive_order
from hetero_megatron.schedule.show import format_grid, format_rows
from hetero_megatron.schedule.simulate import ChunkSeconds, Costs, Timed, Timeline, simulate, simulate_many
from hetero_megatron.schedule.validate import ScheduleError, validate

__all__ = [
    "Action",
    "ChunkSeconds",
    "Costs",
    "Held",
    "Schedule",
    "ScheduleError",
    "Timed",
    "Timeline",
    "format_grid",
    "format_rows",
    "generate",
    "held_states",
    "in_flight",
    "lower",
    "lowered",
    "receive_order",
    "schedule_names",
    "simulate",
    "simulate_many",
    "validate",
    "validate_collectives",
    "with_synchronisation",
]
