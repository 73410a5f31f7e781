"""Which GPUs each process of `tba run` gets: the trainer the first, searchers the others, in turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tba.contracts.errors import UserError
from tba.gpus import DRIVER

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Cards:
    """As `CUDA_VISIBLE_DEVICES` has them; all empty where there is none, or where they are not ours to share out."""

    trainer: tuple[str, ...] = ()
    searchers: tuple[tuple[str, ...], ...] = ()

    def of_trainer(self) -> dict[str, str]:
        """Environment."""
        return {VARIABLE: ",".join(self.trainer)} if self.trainer else {}

    def of_searcher(self, index: int) -> dict[str, str]:
        """Environment."""
        return {VARIABLE: ",".join(self.searchers[index])} if self.searchers else {}

    def shared(self) -> dict[str, list[str]]:
        """Cards that a searcher does not have alone, and who is there."""
        names = [("trainer", self.trainer), *((f"searcher-{i}", cards) for i, cards in enumerate(self.searchers))]
        users: dict[str, list[str]] = {}
        for name, cards in names:
            for card in cards:
                users.setdefault(card, []).append(name)
        return {card: found for card, found in users.items() if len(found) > 1}

    def describe(self) -> str:
        """For people; empty without cards."""
        if not self.trainer:
            return ""
        searchers = ", ".join(f"searcher-{i} {'+'.join(cards)}" for i, cards in enumerate(self.searchers))
        return f"trainer {'+'.join(self.trainer)}" + (f", {searchers}" if searchers else "")


def visible_cards(environment: Mapping[str, str], driver: Path = DRIVER) -> tuple[str, ...]:
    """What a process started here would see; none where GPUs are cut up (MIG), unless the environment names parts."""
    named = environment.get(VARIABLE)
    if named is not None:
        return tuple(c.strip() for c in named.split(",") if c.strip() not in ("", "-1"))
    if any(driver.glob("capabilities/gpu*/mig/gi*")):
        return ()
    return tuple(str(i) for i in range(len(list(driver.glob("gpus/*")))))


def share_out(cards: Sequence[str], *, ranks: int, searchers: int, each: int) -> Cards:
    """`ranks` cards to the trainer, `each` to a searcher. Too few for all: searchers share, at last with the trainer.

    Raises: UserError if there are cards, and fewer than the trainer's ranks or one searcher must have.
    """
    if not cards:
        return Cards()
    for field, wanted in (("trainer.gpusPerNode", ranks), ("searcher.engine.tensorParallelSize", each)):
        if wanted > len(cards) and (searchers or field.startswith("trainer")):
            raise UserError(
                f"{field} is {wanted}, and this machine shows {len(cards)} GPUs ({', '.join(cards)}): lower it"
            )
    free = cards[ranks:] if len(cards) - ranks >= each else cards
    parts = [tuple(free[i : i + each]) for i in range(0, len(free) - each + 1, each)]
    return Cards(tuple(cards[:ranks]), tuple(parts[i % len(parts)] for i in range(searchers)))
