"""How a wrong kernel is planted: with the rule that it breaks, and words of the diagnosis it must get."""

from dataclasses import dataclass, field

from ropegrad.verify import Contract, Domain


@dataclass(frozen=True)
class Planted:
    """A wrong function. words: in one of its diagnoses; () where the rule itself says it all."""

    function: object
    rule: str
    words: tuple[str, ...]
    contract: Contract
    domain: Domain = field(default_factory=Domain)

    @property
    def name(self):
        return self.function.__name__


PLANTED: list[Planted] = []


def planted(rule, *words, domain=None, **contract):
    """A decorator: the function breaks this rule."""

    def keep(function):
        PLANTED.append(Planted(function, rule, words, Contract(**contract), domain or Domain()))
        return function

    return keep
