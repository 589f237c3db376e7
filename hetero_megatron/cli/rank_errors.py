"""What ends a rank: an error becomes one line on standard error and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from hetero_megatron.cli.log import record_error, say_error
from hetero_megatron.environment.launcher import LauncherEnvironment
from hetero_megatron.errors import INTERRUPTED, UserError
from hetero_megatron.utils.out_of_memory import out_of_memory

if TYPE_CHECKING:
    from hetero_megatron.comm import CommError

USER_ERROR = 2  # exit code of every refusal, on every rank
PEER_ERROR = 3  # a peer died or does not answer


def end_rank(error: BaseException, launcher: LauncherEnvironment, environment: Mapping[str, str]) -> int:
    """Say what ended this rank; returns its exit code. An error that is nobody's but ours is raised again."""
    if isinstance(error, UserError):
        say_error(str(error), environment)
        return USER_ERROR
    if isinstance(error, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    if (refusal := out_of_memory(error, launcher.rank) or compiler_failed(error)) is not None:
        say_error(str(refusal), environment)
        return USER_ERROR
    if not is_lost_peer(error):
        record_error(traceback.format_exc(), environment)
        raise error
    return peer_error(error, launcher, environment)


def compiler_failed(error: BaseException) -> UserError | None:
    """What to tell the user where torch's compiler has no code for these devices, or made wrong ones."""
    if type(error).__module__ not in ("torch._dynamo.exc", "torch._inductor.exc"):
        return None
    why = " ".join(str(error).split("\n\n")[0].split())[:200]
    problem = f"torch's compiler fails on this rank's device ({type(error).__name__}: {why})"
    return UserError(problem, field="--compile", accepted="to leave it out, or --compile-backend of another compiler")


def peer_error(error: CommError, launcher: LauncherEnvironment, environment: Mapping[str, str]) -> int:
    """The same of a peer that died or does not answer, with a diagnosis for the launcher."""
    from hetero_megatron.monitoring.stragglers import leave_diagnosis

    say_error(str(error), environment)
    leave_diagnosis(error, launcher.diagnoses)
    return PEER_ERROR


def is_lost_peer(error: BaseException) -> TypeGuard[CommError]:
    """Without importing what knows the class where it cannot be one."""
    if not isinstance(error, RuntimeError):
        return False
    from hetero_megatron.comm.work import CommError

    return isinstance(error, CommError)
