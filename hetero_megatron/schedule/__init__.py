"""Pipeline schedules as data: generated, lowered to communication, validated, printed, timed. No torch."""

from hetero_megatron.schedule.actions import Action, Held, Schedule, held_states, in_flight, receive_order
from hetero_megatron.schedule.generators import generate, lower, lowered, schedule_names, with_synchronisation
from hetero_megatron.schedule.simulate import ChunkSeconds, Costs, Timed, Timeline, simulate, simulate_many
from hetero_megatron.schedule.validate import ScheduleError, format_grid, format_rows, validate, validate_collectives

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
