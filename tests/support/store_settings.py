"""Retry and transfer settings of the store tests."""

from tba.store.retry import RetryPolicy
from tba.store.transfer import TransferSettings

# Patient, with short waits: for tests in which the store recovers.
TEST_RETRY = RetryPolicy(
    budget_seconds=20, base_delay_seconds=0.01, max_delay_seconds=0.2, request_timeout_seconds=5, max_attempts=50
)
# For tests in which it does not.
SHORT = RetryPolicy(budget_seconds=0.3, base_delay_seconds=0.05, request_timeout_seconds=3)
# Parts as small as S3 allows, so that a few megabytes are already "large".
TEST_TRANSFER = TransferSettings(part_bytes=5 << 20, num_threads=4)
