"""What crosses a process border: configuration, records and object keys. Standard library and pydantic only."""
