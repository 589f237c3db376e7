"""What each kind of word in a cluster file may hold, checked where the file is read.

Such words end up in command lines, batch scripts, manifests and names of files. So none begins with ``-`` (it would be
an option), none but a path has ``/``, and none has what a shell, SLURM or Kubernetes would read as more than a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetero_megatron.errors import UserError
from hetero_megatron.utils.yaml_document import Entry


@dataclass(frozen=True)
class WordKind:
    """A kind of word.

    Args:
        what: ``is not …``.
        pattern: of the whole word.
        accepted: in a message.
        longest: characters.
    """

    what: str
    pattern: str
    accepted: str
    longest: int = 200

    def fits(self, text: str) -> bool:
        return len(text) <= self.longest and re.fullmatch(self.pattern, text) is not None

    def read(self, entry: Entry) -> str:
        """The word of a cluster file; UserError."""
        text = entry.text()
        if not self.fits(text):
            entry.fail(f"is not {self.what}", accepted=self.accepted)
        return text

    def check(self, text: str, field: str, where: str = "") -> str:
        """A word from somewhere else, as a flag; UserError."""
        if not self.fits(text):
            raise UserError(f"is not {self.what}", field=field, value=text, accepted=self.accepted, where=where)
        return text


_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
HOST = WordKind("a name or address of a host", r"[A-Za-z0-9_]([A-Za-z0-9_.:%-]*[A-Za-z0-9_])?",
                "e.g. node-0, or 10.0.0.1", 253)  # fmt: skip
# The name of a host, of a log file and of a link's end.
NODE = WordKind("a name for nodes", r"[A-Za-z0-9_]([A-Za-z0-9_.:%+-]*[A-Za-z0-9_+])?",
                "letters, digits and . _ - + inside, e.g. node-a")  # fmt: skip
CHIP = WordKind("a name for a chip", r"\w[\w .+()@:-]*", "letters, digits, blanks and . _ - + ( ) @ : inside")
VENDOR = WordKind("a vendor's name", r"\w[\w .&+-]*", "letters, digits and blanks")
USER = WordKind("the name of a user", r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*", "letters, digits and . _ - @ + inside", 100)
INTERFACES = WordKind(
    "the name of a network interface", r"\w[\w.:@-]{0,14}(,\w[\w.:@-]{0,14})*", "e.g. eth0, or eth0,eth1"
)
PATH = WordKind("a path", r"[\w/.+@][\w/.+@%=:, -]*",
                "letters, digits, blanks and / . _ - + @ % = : , (~ and variables are not replaced)", 1000)  # fmt: skip
ABSOLUTE = WordKind("an absolute path", r"/[\w/.+@%=, -]*", "e.g. /data", 1000)
SLURM = WordKind("one word of SLURM", r"[A-Za-z0-9_][A-Za-z0-9_.,:/=+@-]*", "letters, digits and . , : / = + @ _ -")
SLURM_TIME = WordKind(
    "a time limit of SLURM", r"\d+(-\d+)?(:\d+){0,2}|UNLIMITED|INFINITE", "minutes, HH:MM:SS, D-HH or D-HH:MM:SS"
)
IMAGE = WordKind("the name of an image", r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", "REGISTRY/NAME:TAG", 500)
NAMESPACE = WordKind("a name in Kubernetes", r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "small letters, digits and -")
CLAIM = WordKind("a name in Kubernetes", _DOMAIN, "small letters, digits, - and .")
LABEL_NAME = WordKind("the name of a label", rf"({_DOMAIN}/)?{_LABEL}", "e.g. pool, or example.com/pool", 317)
LABEL_VALUE = WordKind("the value of a label", rf"({_LABEL})?", "at most 63 letters, digits and . _ -")
RESOURCE = WordKind("a resource of Kubernetes", rf"({_DOMAIN}/)?{_LABEL}", "e.g. nvidia.com/gpu", 317)
NFS = WordKind("an export", r"[A-Za-z0-9_][A-Za-z0-9_.-]*:/[\w/.+@%=, -]*", "SERVER:/PATH", 1000)
VARIABLE = WordKind("the name of a variable", r"[A-Za-z_][A-Za-z0-9_]*", "letters, digits and _")


def check_printable(entry: Entry) -> None:
    """Refuse line breaks and other control characters anywhere in a document, in keys and in values."""
    if isinstance(entry.value, dict):
        for key, item in entry.value.items():
            if not key.isprintable():
                item.fail(f"the key {key!r} has control characters", accepted="printable characters")
            check_printable(item)
    elif isinstance(entry.value, list):
        for item in entry.value:
            check_printable(item)
    elif isinstance(entry.value, str) and not entry.value.isprintable():
        entry.fail("line breaks and control characters are none of a cluster file", accepted="printable characters")
