"""argparse for sub-commands: whatever is wrong with the command line is a UserError, as everywhere else."""

from __future__ import annotations

import argparse
from typing import NoReturn

from hetero_megatron.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """Refuses by UserError; no abbreviated flags."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"hetero-megatron {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(message, where=self.prog, accepted=f"`{self.prog} --help` lists the flags")
