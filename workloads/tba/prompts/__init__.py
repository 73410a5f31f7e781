"""Prompt sets: read once from the user's data, materialised in the bucket with stable ids, walked by each searcher.

JSON Lines · Parquet · data set of the hub ─► read ─► materialize (template, tokens) ─► prompts/{sha256}.arrow ─► walk
"""

from tba.prompts.materialize import PromptSet, load_prompt_set, materialize, usable_prompts
from tba.prompts.read import RawPrompt, read_prompts
from tba.prompts.walk import PromptWalk

__all__ = ["PromptSet", "PromptWalk", "RawPrompt", "load_prompt_set", "materialize", "read_prompts", "usable_prompts"]
