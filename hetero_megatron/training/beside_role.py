"""A run beside a role on ranks of its own, on a rank that trains: however it ends, the role's ranks are told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from hetero_megatron.comm import Comm, CommError
from hetero_megatron.comm.group import Refusal
from hetero_megatron.errors import UserError
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.role_client import RoleClient, RoleMeetings
from hetero_megatron.training.role_messages import Instruction


def client_of(config: RunConfig, comm: Comm) -> RoleMeetings:
    """Of the role beside a run."""
    assert config.role is not None
    if config.role.name != GENERATOR:
        return RoleClient(config, comm)
    from hetero_megatron.training.generator_client import generator_client

    return generator_client(config, comm)


def beside_role(config: RunConfig, comm: Comm, run: Callable[[RoleMeetings], int]) -> int:
    """``run`` on a rank that trains; however it ends, the role's ranks are told. Returns the exit code."""
    client = client_of(config, comm)
    try:
        code = run(client)
    except UserError as error:
        with suppress(CommError):  # what was wrong is not that a peer is gone, too
            client.end(Instruction(ends=True, problem=Refusal.of(error)))
        raise
    client.end(Instruction(ends=True, code=code))
    return code
