"""Proving gradients right: an oracle, derived bounds, edge cases and the judge that applies them."""

from ropegrad.verify.assertion import assert_gradients
from ropegrad.verify.case import Case
from ropegrad.verify.check import Finding, Verdict, check
from ropegrad.verify.domain import Domain
from ropegrad.verify.draws import make_case
from ropegrad.verify.target import Contract

__all__ = ["Case", "Contract", "Domain", "Finding", "Verdict", "assert_gradients", "check", "make_case"]
