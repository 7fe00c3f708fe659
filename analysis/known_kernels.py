"""Verdict, domain and contract of rotary kernels that no one here wrote.

    python analysis/known_kernels.py FILE.json

Each is judged twice: on the whole domain, and inside the one that it is made for. What is not installed or
cannot run here is written down with the reason. A Triton kernel compiles anew for each number of heads and
head size: a battery with few of them has to do.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropegrad.target_report import as_json
from ropegrad.verify.battery import battery, property_recipes, table_shapes
from ropegrad.verify.domain import Domain
from ropegrad.verify.examine import examine
from ropegrad.verify.process import Process
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.target import Contract, NoTarget

HERE = Path(__file__).resolve().parent
OURS = HERE / "known_targets.py"
GEOMETRIES = 8  # numbers of heads and head sizes that a kernel is compiled for
KEPT = ("verdict", "problems", "calls", "declined", "rules", "observed_contract", "worst_error_over_bound")


@dataclass(frozen=True)
class Known:
    """A kernel: the package that it is in, the target, and what it is for.

    unjudged: why it cannot be judged, wherever it is installed.
    """

    package: str
    target: str = ""
    contract: dict[str, Any] = field(default_factory=dict)
    domain: Domain = field(default_factory=Domain)
    unjudged: str = ""


GPU = {"of": "forward", "arrays": "torch", "device": "cuda", "needs": ("q", "k")}
REAL = Domain(tables="equal-halves", empty="no", strides="contiguous", head_dim=(64, 128), gqa=(1, 4))
HALF = {"layout": "bshd", "table": "half", "table_shape": "sd"}
LLAMA = "transformers.models.llama.modeling_llama:apply_rotary_pos_emb"
KNOWN = (
    Known("transformers", LLAMA, {"of": "forward", "arrays": "torch"}),
    Known("liger_kernel", f"{OURS}:Liger", GPU, REAL),
    Known("flash_attn", f"{OURS}:FlashAttention", GPU | HALF, REAL),
    Known("transformer_engine", unjudged="it takes angles, not tables: there are no cos and sin to agree on"),
)


def few(recipes: Iterable[Recipe]) -> Iterator[Recipe]:
    """The problems with the first few geometries."""
    seen: set[tuple[int | None, int | None, int]] = set()
    for recipe in recipes:
        rope = recipe.rope
        geometry = (rope.heads, rope.kv_heads, rope.head_dim)
        if geometry in seen or len(seen) < GEOMETRIES:
            seen.add(geometry)
            yield recipe


def judged(known: Known, domain: Domain) -> dict[str, Any]:
    """The verdict on a domain."""
    contract, start = Contract(**known.contract), time.perf_counter()
    with Process(known.target, contract, timeout=60) as process:
        seen = examine(
            process, few(battery(contract, domain)), domain, lambda what: None, (),
            few(property_recipes(contract, domain)), table_shapes(contract, domain),
        )  # fmt: skip
    report = as_json(known.target, seen, time.perf_counter() - start)
    rules = {rule: found for rule, found in report["rules"].items() if found}
    return {key: report[key] for key in KEPT} | {
        "rules": rules, "domain": asdict(domain), "contract": asdict(contract), "seconds": report["seconds"],
    }  # fmt: skip


def record(known: Known) -> dict[str, Any]:
    """All that is known of a kernel here."""
    target = known.target.replace(f"{HERE.parent}{os.sep}", "")
    facts: dict[str, Any] = {"package": known.package, "target": target}
    if importlib.util.find_spec(known.package) is None:
        return facts | {"skipped": "not installed here"}
    facts["version"] = _version(known.package)
    if known.unjudged:
        return facts | {"skipped": known.unjudged}
    try:
        whole = judged(known, Domain())
        inside = judged(known, known.domain) if known.domain != Domain() else whole
    except NoTarget as error:
        return facts | {"skipped": str(error)}
    return facts | {"whole_domain": whole, "own_domain": inside}


def _version(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package, [package])
    return importlib.metadata.version(names[0])


def line(found: dict[str, Any]) -> str:
    """A record in a sentence."""
    if "skipped" in found:
        return f"{found['package']}: skipped: {found['skipped']}"
    return f"{found['package']} {found['version']}: " + "; ".join(
        f"{place.replace('_', ' ')}: {one['verdict']} ({one['problems']} problems, {one['seconds']:.0f} s) "
        + ", ".join(one["rules"])
        for place, one in ((place, found[place]) for place in ("whole_domain", "own_domain"))
    )


def main() -> None:
    """Judge all, and write the file."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FILE.json")
    found = []
    for known in KNOWN:
        found.append(record(known))
        print(line(found[-1]), flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
