"""The one base of every record that crosses a process border."""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Contract(BaseModel):
    """A frozen record: camelCase outside, snake_case inside, unknown fields are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="null",
        protected_namespaces=(),
    )

    def to_json(self) -> bytes:
        """Encode as UTF-8 JSON with camelCase names."""
        return self.model_dump_json().encode()
