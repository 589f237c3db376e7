"""FILE.cluster.yaml beside a plan FILE: the cluster that its ranks refer to, if that is not --cluster itself.

A stale one must not stay beside a new plan, and a user's file must not be overwritten: ours have a mark in their first
line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hetero_megatron.cli.output import check_writable, unwritable, write_text
from hetero_megatron.errors import UserError

MARK = "# By hetero-megatron plan, which also removes it: the cluster that the ranks of the plan beside it are of.\n"


class ClusterBesidePlan:
    """Created before the search, so that errors are raised before it.

    Args:
        out: the plan file; None: none is written.
        cluster: the file of --cluster; left alone even if it is one that an earlier call wrote.
        may_write: the plan may be for another cluster.
    """

    def __init__(self, out: str | None, cluster: str, may_write: bool) -> None:
        self.path = Path(f"{out}.cluster.yaml") if out else None
        self.keep = self.path is not None and self.path.exists() and Path(cluster).exists()
        self.keep = self.keep and self.path is not None and self.path.samefile(cluster)
        if self.path is None:
            return
        if self.keep and may_write:
            self._refuse("is the file of --cluster, and would be replaced")
        if self.path.exists() and not self.keep and not self._ours():
            self._refuse(f"is there and not by this command: beside the new {out} it would be taken for its cluster")
        if may_write:
            check_writable(str(self.path), "--out")

    def finish(self, text: str | None, quiet: bool) -> None:
        """Write ``text`` with our mark; None: the plan is for --cluster, and an earlier one goes."""
        if self.path is None:
            return
        message = ""
        if text is not None:
            write_text(self.path, "--out", MARK + text)
            message = f"the plan's ranks refer to {self.path}"
        elif not self.keep and self.path.exists():
            try:
                self.path.unlink()
            except OSError as error:
                raise unwritable(error, str(self.path), "--out") from None
            message = f"removed {self.path} of an earlier plan: this one's ranks refer to --cluster"
        if message and not quiet:
            print(message, file=sys.stderr)

    def _ours(self) -> bool:
        assert self.path is not None
        try:
            with self.path.open("rb") as file:
                return file.read(len(MARK)) == MARK.encode()
        except OSError:
            return False

    def _refuse(self, problem: str) -> None:
        raise UserError(problem, field="--out", value=str(self.path), accepted="another --out, or move that file away")
