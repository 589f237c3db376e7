"""Precision alignment inside a training run, as the flags ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hetero_megatron.ops import KernelPlan
from hetero_megatron.training.config import AlignmentConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.utils.text import notice_line

if TYPE_CHECKING:
    from hetero_megatron.training.alignment.capture import Call, CallRecorder, CaptureFiles, LiveCompare
    from hetero_megatron.training.alignment.dump import LayerDump


class Alignment:
    """Wraps the kernel plan before the model is built, follows the model, and writes after each watched step."""

    def __init__(self, config: AlignmentConfig) -> None:
        self.config = config
        self._compare: LiveCompare | None = None
        self._files: CaptureFiles | None = None
        self._watch: CallRecorder | None = None
        self._dump: LayerDump | None = None

    def wrap(self, kernels: KernelPlan, rank: int) -> KernelPlan:
        config = self.config
        if config.check is None and config.capture is None:
            return kernels
        from hetero_megatron.training.alignment.capture import CallRecorder, CaptureFiles, LiveCompare

        if config.check is not None:
            self._compare = LiveCompare(kernels.registry.specs)
        if config.capture is not None:
            self._files = CaptureFiles(f"{config.capture}/rank{rank:05d}")
        ops = [] if config.check is None or "all" in config.check else list(config.check)
        self._watch = CallRecorder(self._done, ops, config.layers)
        return self._watch.wrap(kernels)

    def _done(self, call: Call) -> None:
        if self._files is not None:
            self._files(call)
        if self._compare is not None:
            self._compare(call)

    def follow(self, runtime: Runtime) -> None:
        """The model is built now."""
        runtime.hooks.unwatched = self.paused
        if self._watch is not None:
            self._watch.follow(runtime.stage_model.module)
            specs, rank = runtime.stage_model.kernels.registry.specs, runtime.comm.rank
            for op, why in unwatched_operators(runtime).items():
                if self._watch.wants(specs[op]):
                    print(notice_line(f"operators of rank {rank}: {op} is not watched: {why}"), flush=True)
        if self.config.dump is not None:
            from hetero_megatron.training.alignment.dump import LayerDump

            self._dump = LayerDump(runtime.stage_model.module, self.config.dump, runtime.comm.rank)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing inside is recorded."""
        watched = [x for x in (self._watch, self._dump) if x is not None]
        for x in watched:
            x.active = False
        try:
            yield
        finally:
            for x in watched:
                x.active = True

    def after_step(self, step: int, runtime: Runtime) -> None:
        """Write what the step showed; the last watched step ends it."""
        if step > self.config.steps:
            return
        if self._dump is not None:
            self._dump.write(step)
        if step < self.config.steps:
            return
        if self._dump is not None:
            self._dump.close()
        if self._watch is not None:
            self._watch.active = False
        if self._compare is not None:
            place = runtime.here.place
            print(
                f"operators of rank {runtime.comm.rank} (pipeline {place.pipeline} stage {place.stage}) against fp64:\n"
                f"{self._compare.text(runtime.stage_model.dtype)}",
                flush=True,
            )


def unwatched_operators(runtime: Runtime) -> dict[str, str]:
    """Operators whose kernels cannot be watched by wrapping the kernel plan's callables, and why."""
    kernels = runtime.stage_model.kernels
    reasons = {"adamw": "it changes its arguments in place"}
    if runtime.here.context is not None:
        reasons["attention"] = reasons["attn_merge"] = "context groups call its kernel tile by tile"
    if "vocab_cross_entropy" in kernels.choices:
        reasons["vocab_cross_entropy"] = "its forward and backward are called apart"
    if kernels.fp8 is not None:
        reasons[kernels.fp8] = "its scales come from several ranks"
    if runtime.loss.head is not None and "vocab_cross_entropy" in kernels.choices:
        reasons["gemm"] = "the head's is called chunk by chunk (that of the layers is seen)"
    return reasons
