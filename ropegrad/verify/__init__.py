"""Proving gradients right: an oracle, derived bounds, edge cases and the judge that applies them."""

from ropegrad.verify.case import Case
from ropegrad.verify.check import Finding, Verdict, check
from ropegrad.verify.draws import make_case

__all__ = ["Case", "Finding", "Verdict", "check", "make_case"]
