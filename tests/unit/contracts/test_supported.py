"""What the schema has and this release cannot do is refused, with the field and the remedy."""

import pytest
from support.learning import run_config

from tba.contracts.config import LoRA, Reference
from tba.contracts.errors import UserError
from tba.contracts.supported import refuse_unsupported


def test_an_ordinary_job_passes():
    refuse_unsupported(run_config())


@pytest.mark.parametrize("field", ["spec.model.lora", "spec.objective.reference.scorer"])
def test_each_unsupported_field_is_named(field):
    config = run_config()
    changed = {
        "spec.model.lora": {"model": config.model.model_copy(update={"lora": LoRA()})},
        "spec.objective.reference.scorer": {
            "objective": config.objective.model_copy(update={"reference": Reference(scorer="Searcher")})
        },
    }[field]
    with pytest.raises(UserError, match=field):
        refuse_unsupported(config.model_copy(update=changed))
