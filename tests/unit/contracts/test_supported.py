"""What the schema has and this release cannot do is refused, with the field and the remedy."""

import pytest
from support.learning import run_config

from tba.contracts.config import LoRA, Reference
from tba.contracts.errors import UserError
from tba.contracts.supported import refuse_unsupported


def test_an_ordinary_job_passes():
    config = run_config()
    refuse_unsupported(config)
    refuse_unsupported(config.model_copy(update={"model": config.model.model_copy(update={"lora": LoRA()})}))


def test_an_unsupported_field_is_named():
    config = run_config()
    changed = {"objective": config.objective.model_copy(update={"reference": Reference(scorer="Searcher")})}
    with pytest.raises(UserError, match=r"spec\.objective\.reference\.scorer"):
        refuse_unsupported(config.model_copy(update=changed))
