"""The commands of a shell script as words, as far as they can be known without running it.

Variables, arrays, defaults (``${A:-8}``), sums (``$((A * B))``), quotes, continued lines and ``bash -c '...'`` are
resolved. What depends on what is run, or on a branch, stays in a word as a mark: ``unresolved`` finds it. What
is said of one word, whether it would be honoured, is a ``Judged``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_BLANKS = str.maketrans({" ": "\ue002", "\n": "\ue002", "\t": "\ue002"})
_MARKED = re.compile("\ue000([^\ue001]*)\ue001")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)
_DEFAULT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+)(\[[@*]\])?(:?[-=+?]|)(.*)", re.DOTALL)
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_OPEN, _CLOSE = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_BEGIN = ("then", "do", "else", "elif", "{", "(", "!", "time", "exec", "nohup", "eval")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_SUMS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
         ast.Div: operator.floordiv, ast.Mod: operator.mod}  # fmt: skip
MAX_WORDS = 100_000


@dataclass(frozen=True)
class ShellCommand:
    """Its words, and the line on which it begins."""

    words: tuple[str, ...]
    line: int


def mark(text: str) -> str:
    """What is not known, as it stands in the script, as a part of a word."""
    return f"\ue000{shown(text).translate(_BLANKS)}\ue001"


def unresolved(word: str) -> list[str]:
    """What of a word is not known."""
    return [part.replace("\ue002", " ") for part in _MARKED.findall(word)]


def shown(word: str) -> str:
    """A word with what is not known as it stands in the script."""
    return _MARKED.sub(lambda match: match[1].replace("\ue002", " "), word)


@dataclass
class _Shell:
    values: dict[str, list[str]]
    branch: int = 0
    commands: list[ShellCommand] = field(default_factory=list)
    budget: int = MAX_WORDS  # each value can double the one before

    def expand(self, text: str) -> list[str]:
        """The words that a word of the script becomes."""
        words, quoted, position = [""], False, 0
        while position < len(text):
            letter = text[position]
            if letter == "\\" and position + 1 < len(text):
                words[-1] += "" if text[position + 1] == "\n" else text[position + 1]
                position += 2
            elif letter == "'":
                end = text.find("'", position + 1)
                end = len(text) if end < 0 else end
                words[-1] += text[position + 1 : end]
                quoted, position = True, end + 1
            elif letter == '"':
                end = _end_of_quote(text, position)
                inner = text[position + 1 : end]
                if array_name := re.fullmatch(r"\$\{(\w+)\[@\]\}", inner):  # one word for each element
                    array = self._list(array_name[1])
                    words[-1:] = [words[-1] + array[0], *array[1:]] if array else [words[-1]]
                    quoted = quoted or bool(array)
                else:
                    words[-1] += self.text(inner)
                    quoted = True
                position = end + 1
            elif letter in "$`":
                position, found_words = self._dollar(text, position)
                pieces = " ".join(found_words).split() if found_words else []
                words[-1:] = [words[-1] + pieces[0], *pieces[1:]] if pieces else [words[-1]]
            else:
                words[-1] += letter
                position += 1
        self.budget -= len(words) + sum(map(len, words)) // 100
        if self.budget < 0:
            return []
        return words if quoted else [word for word in words if word]

    def text(self, text: str) -> str:
        """The same of text in double quotes: one word."""
        expanded, position = "", 0
        while position < len(text):
            if text[position] == "\\" and text[position + 1 : position + 2] in ('"', "\\", "$", "`", "\n"):
                expanded += "" if text[position + 1] == "\n" else text[position + 1]
                position += 2
            elif text[position] in "$`":
                position, words = self._dollar(text, position)
                expanded += " ".join(words)
            else:
                expanded += text[position]
                position += 1
        return expanded

    def _list(self, name: str) -> list[str]:
        return self.values[name] if name in self.values else [mark(f"${name}")]

    def _dollar(self, text: str, at: int) -> tuple[int, list[str]]:
        """(where it ends, its words) of an expansion."""
        if text[at] == "`":
            end = text.find("`", at + 1)
            end = len(text) - 1 if end < 0 else end
            return end + 1, [mark(text[at : end + 1])]
        text_after = text[at + 1 :]
        if text_after.startswith("(("):
            end = text.find("))", at)
            end = len(text) - 2 if end < 0 else end
            return end + 2, [self._sum(text[at + 3 : end], text[at : end + 2])]
        for opening, closing in (("(", ")"), ("{", "}")):
            if text_after.startswith(opening):
                end = _end_of(text, at + 1, opening, closing)
                inner = text[at + 2 : end]
                return end + 1, [mark(text[at : end + 1])] if opening == "(" else self._braces(inner)
        name = _NAME.match(text_after) or re.match(r"[0-9@*#?$!]", text_after)
        if name is None:
            return at + 1, ["$"]
        return at + 1 + name.end(), self._list(name[0])

    def _braces(self, inner: str) -> list[str]:
        match = _DEFAULT.fullmatch(inner)
        if match is None or (match[4] and not match[3]):
            return [mark(f"${{{inner}}}")]
        name, kind, word = match[1], match[3].lstrip(":"), match[4]
        if kind == "+":
            return [self.text(word)] if name in self.values else []
        if name in self.values and (self.values[name] not in ([], [""]) or not match[3].startswith(":")):
            return self.values[name]
        return [self.text(word)] if kind in ("-", "=") else [mark(f"${name}")]

    def _sum(self, inner: str, whole: str) -> str:
        text = self.text(re.sub(r"(?<![\w$}])\$?([A-Za-z_]\w*)", r"${\1}", inner))
        try:
            return str(_evaluate(ast.parse(text.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, KeyError, RecursionError, MemoryError):
            return mark(whole)

    def assign(self, name: str, words: list[str], add: bool) -> None:
        old_words = self.values.get(name)
        if self.branch and old_words is not None and (add or old_words != words):
            words = [mark(f"${name}")] if not add else [*old_words, mark(f"${name}")]
        elif add and old_words is not None:
            words = [*old_words, *words]
        self.values[name] = words

    def run(self, words: list[str], line: int) -> None:
        """A command of the script, before its words are expanded."""
        while words and words[0] in (*_BEGIN, *_OPEN, *_CLOSE):
            self.branch += (words[0] in _OPEN) - (words[0] in _CLOSE)
            if words[0] in ("for", "case"):
                for name in words[1:2] if words[0] == "for" else ():
                    self.values[name] = [mark(f"${name}")]
                return
            words = words[1:]
        if words and words[0] in _DECLARE:
            words = [word for word in words[1:] if not word.startswith("-")]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            name, add, value = match[1], match[2] == "+", match[3]
            if value.startswith("("):
                items = [word for piece in split(value[1:-1]) for word in self.expand(piece)]
                self.assign(name, items, add)
            else:
                text = "".join(self.expand(f'"{value}"' if value[:1] not in "\"'" else value)) if value else ""
                old_text = " ".join(self.values.get(name, [""])) if add else ""
                if add and self.branch:
                    self.values[name] = [f"{old_text} {mark(text.strip())}"]
                else:
                    self.assign(name, [old_text + text], False)
            words = words[1:]
        expanded = [word for piece in words for word in self.expand(piece)]
        if expanded:
            self.commands.append(ShellCommand(tuple(expanded), line))
            for index, word in enumerate(expanded[:-1]):
                if word in ("-c", "-lc") and index and expanded[index - 1].rpartition("/")[2] in ("bash", "sh"):
                    inner = _Shell(self.values, self.branch, budget=self.budget // 2)
                    self.commands += [ShellCommand(command.words, line) for command in inner.read(expanded[index + 1])]

    def read(self, text: str) -> list[ShellCommand]:
        for words, line in _lines(text):
            if self.budget > 0:
                self.run(words, line)
        return self.commands


def read_script(text: str, environment: Mapping[str, str] = {}) -> list[ShellCommand]:
    """The commands of a script; ``environment``: values of variables that it does not set itself."""
    return _Shell({name: [value] for name, value in environment.items()}).read(text)


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp):
        value = int(_SUMS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
        if abs(value) < 2**63:
            return value
    raise ValueError("no sum of whole numbers")


def split(text: str) -> list[str]:
    """The words of some lines, unexpanded, across line ends."""
    return [word for words, _ in _lines(text, breaks=" \t\n", ends="") for word in words]


def _lines(text: str, breaks: str = " \t", ends: str = "\n;&|") -> Iterator[tuple[list[str], int]]:
    """(words of a simple command, its line): quotes, brackets and continued lines stay whole; redirections are left
    out."""
    words: list[str] = []
    word, position, line, begin = "", 0, 1, 1
    redirected = False
    while position <= len(text):
        letter = text[position] if position < len(text) else ""
        if letter == "" or letter in breaks or letter in ends or (letter == "#" and not word):
            if word and not redirected:
                words.append(word)
            redirected = redirected and not word
            word = ""
            if letter == "#":
                end = text.find("\n", position)
                position = len(text) if end < 0 else end
                continue
            if (letter == "" or letter in ends) and words:
                yield words, begin
                words = []
            line += letter == "\n"
            position += 1
            begin = begin if words else line
            continue
        if heredoc := _HEREDOC.match(text, position):
            body = text.find("\n", position)
            closing = re.compile(rf"^\s*{heredoc[2]}\s*$", re.MULTILINE).search(text, body) if body >= 0 else None
            stop = closing.end() if closing is not None else len(text)
            line += text.count("\n", body, stop) if body >= 0 else 0
            text = text[:position] + text[heredoc.end() : max(body, heredoc.end())] + text[stop:]
            continue
        if letter in "<>" and not (word and not word.isdecimal()):
            word, redirected = "", True
            position += len((re.compile(r"[<>]+&?").match(text, position) or [letter])[0])
            continue
        end = _end_of_piece(text, position, word)
        line += text.count("\n", position, end)
        word += text[position:end]
        position = end


def _end_of_piece(text: str, at: int, word: str) -> int:
    letter = text[at]
    if letter == "\\":
        return min(len(text), at + 2)
    if letter == "'":
        end = text.find("'", at + 1)
        return len(text) if end < 0 else end + 1
    if letter == '"':
        return min(len(text), _end_of_quote(text, at) + 1)
    if letter == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    if letter == "$" and text[at + 1 : at + 2] in ("(", "{"):
        opening = text[at + 1]
        return min(len(text), _end_of(text, at + 1, opening, ")" if opening == "(" else "}") + 1)
    if letter == "(" and word.endswith("="):  # an array
        return min(len(text), _end_of(text, at, "(", ")") + 1)
    return at + 1


def _end_of_quote(text: str, at: int) -> int:
    """Where the double quote that begins at ``at`` ends."""
    at += 1
    while at < len(text) and text[at] != '"':
        if text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = _end_of(text, at + 1, text[at + 1], ")" if text[at + 1] == "(" else "}")
        at += 2 if text[at : at + 1] == "\\" else 1
    return at


def _end_of(text: str, at: int, opening: str, closing: str) -> int:
    """Where the bracket at ``at`` is closed."""
    depth = 0
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif letter == "'" and opening == "(":
            end = text.find("'", at + 1)
            at = len(text) if end < 0 else end
        elif letter == '"':
            at += 1
            while at < len(text) and text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        elif letter == "#" and opening == "(" and text[at - 1] in " \t\n":  # a comment in an array
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        depth += (letter == opening) - (letter == closing)
        if not depth:
            return at
        at += 1
    return len(text)


HONOURED, NOTICED, REFUSED, OPEN = "honoured", "noticed", "refused", "not resolved"


@dataclass
class Judged:
    """A flag or key of a launch line, its ``values`` as in the script.

    ``reason``: why it is not honoured; ``accepted``: instead.
    """

    flag: str
    values: list[str]
    status: str
    reason: str = ""
    accepted: str = ""
