"""Settings of the schema that this release cannot honour: refused at once, never silently ignored."""

from tba.contracts.config import RunConfig
from tba.contracts.errors import UserError


def refuse_unsupported(config: RunConfig) -> None:
    """Raises: UserError naming the first such field, what it got and the remedy."""
    if config.model.lora is not None:
        raise UserError("spec.model.lora: this release trains full weights only, got an adapter: remove model.lora")
    if config.objective.reference.scorer == "Searcher":
        raise UserError(
            "spec.objective.reference.scorer: this release scores at the trainer, got Searcher: use Trainer"
        )
