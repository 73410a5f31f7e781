"""Settings of the schema that this release cannot honour: refused at once, never silently ignored."""

from tba.contracts.config import RunConfig
from tba.contracts.errors import UserError


def refuse_unsupported(config: RunConfig) -> None:
    """Raises: UserError naming the first such field, what it got and the remedy."""
    kind = config.objective.reference.type
    if config.model.lora is not None and kind != "Fixed":
        raise UserError(
            f"spec.objective.reference.type: model.lora needs Fixed, got {kind}: the reference is the model without "
            "its adapter; set type: Fixed, or remove model.lora"
        )
    if config.objective.reference.scorer == "Searcher":
        raise UserError(
            "spec.objective.reference.scorer: this release scores at the trainer, got Searcher: use Trainer"
        )
