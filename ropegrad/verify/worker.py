"""One job of a campaign: a search in a process of its own, which tells its parent how far it is.

Run as a module: the task comes as a line of JSON on the standard input, lines of JSON go out.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.domain import Domain
from ropegrad.verify.fuzz import Search, database, search
from ropegrad.verify.process import Process
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.target import Contract

EVERY = 0.5  # seconds between two lines


def main() -> None:
    """Search as told, and report."""
    task = json.loads(sys.stdin.readline())
    contract, domain = Contract(**_tuples(task["contract"])), Domain(**_tuples(task["domain"]))
    last = 0.0

    def progress(now: Search) -> None:
        nonlocal last
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            _tell(now)

    store = database(Path(task["database"]), task["target"], contract)
    with Process(
        task["target"], contract, timeout=task["timeout"], memory=task["memory"], folder=task["folder"]
    ) as process:
        found = search(
            process, domain, examples=task["examples"], seconds=task["seconds"], store=store,
            start=task["seed"], progress=progress,
        )  # fmt: skip
    _tell(found, last=True)


def _tell(now: Search, *, last: bool = False) -> None:
    failure = None if now.failure is None or not last else asdict(now.failure.recipe)
    print(json.dumps({"judged": now.judged, "declined": now.declined, "calls": now.calls,
                      "failure": failure}), flush=True)  # fmt: skip


def _tuples(words: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in words.items()}


def recipe_from(fields: dict[str, Any]) -> Recipe:
    """The recipe that `asdict` took apart."""
    spec = _tuples(fields["spec"])
    if "rope" in spec:
        made: RopeSpec | QkvSpec = QkvSpec(**(spec | {"rope": RopeSpec(**_tuples(spec["rope"]))}))
    else:
        made = RopeSpec(**spec)
    return Recipe(**(fields | {"spec": made}))


if __name__ == "__main__":
    main()
