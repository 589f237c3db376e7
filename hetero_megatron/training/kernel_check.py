"""Before the first step: every kernel that a rank is about to use computes there what its operator means."""

from __future__ import annotations

import time

from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.conformance.at_start import used_kernels, wrong_kernels
from hetero_megatron.platform import Platform
from hetero_megatron.utils.text import format_seconds, plural, rank_ranges


def check_kernels(kernels: KernelPlan, world: Group, platform: Platform) -> None:
    """Called on all ranks of the plan, before anything large is in the device's memory; the first one says how long it
    took.

    Raises:
        UserError: on all ranks, naming the first kernel that computes something else, and where.
    """
    begin = time.perf_counter()
    wrong = wrong_kernels(used_kernels(kernels.registry, kernels.choices), platform.device, platform.synchronize)
    everyone = world.gather_objects(wrong, dict[str, str])
    where: dict[str, list[int]] = {}
    for rank, found in zip(world.ranks, everyone, strict=True):
        for kernel in found:
            where.setdefault(kernel, []).append(rank)
    for kernel, ranks in where.items():
        op, told = kernel.partition(":")[0], everyone[world.ranks.index(ranks[0])][kernel]
        raise UserError(
            f"computes otherwise than its operator's definition on {plural(len(ranks), 'rank')} of {world.size} "
            f"({rank_ranges(ranks)}): {told}", field="kernel", value=kernel,
            accepted=f"a kernel that passes `hetero-megatron plugins check`; --kernels {op}=PROVIDER for another one; "
            "other hardware for that rank; or --no-kernel-check",
        )  # fmt: skip
    if world.index == 0:
        took = format_seconds(time.perf_counter() - begin)
        print(f"kernels checked against their definitions in {took} (--no-kernel-check leaves it out)", flush=True)
