"""The single text of a kernel: its file, everything that it includes, and a generated head.

`#line` marks keep file and line of every error message. There are no external headers, so the text alone determines the
result (with the options and the compiler's version), and its hash names it.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import CompileError

CSRC = Path(__file__).resolve().parent.parent / "csrc"
_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
_TYPES = "ptx/types.cuh"


def flatten(path: str, head: str) -> str:
    """Return the kernel file `path` (relative to `csrc/`) as one text.

    Args:
        path: the file.
        head: generated constants and structs; placed after the type names, before everything else.
    Raises:
        CompileError: an included file is missing; names it and the line that asks for it.
    """
    seen: set[Path] = set()
    types = _expand(CSRC / _TYPES, seen)
    kernel = _expand((CSRC / path).resolve(), seen)
    return "\n".join([types, '#line 1 "generated head"', head, kernel]) + "\n"


def _expand(path: Path, seen: set[Path]) -> str:
    if path in seen:
        return ""
    seen.add(path)
    name = path.relative_to(CSRC).as_posix()
    lines = [f'#line 1 "epee/csrc/{name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include:
            target = (path.parent / include[1]).resolve()
            if not target.is_relative_to(CSRC) or not target.exists():
                raise CompileError(f'epee/csrc/{name}({number}): no file "{include[1]}" inside epee/csrc')
            lines += [_expand(target, seen), f'#line {number + 1} "epee/csrc/{name}"']
        elif _PRAGMA_ONCE.match(line):
            lines.append("")
        else:
            lines.append(line)
    return "\n".join(lines)
