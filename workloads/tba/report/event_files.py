"""The run history as TensorBoard event files, written on as the run goes on. Imports tensorboardX."""

from collections.abc import Sequence
from pathlib import Path

from tensorboardX import SummaryWriter

from tba.contracts.history import AnyRow, EvalRow, SampleRow, StepRow
from tba.report.history import History
from tba.report.series import Kind, resumed_at, rows_of, scalars

_SUFFIX = ".tba"
_SCALARS: Sequence[Kind] = ("step", "eval", "publish")
"""Kinds whose numbers are drawn, each under its name: `step/rewardMean`."""

_Id = tuple[str, int, int, int]


class EventFiles:
    """What a directory holds of a run. Files that an earlier one of these wrote there are replaced."""

    def __init__(self, directory: Path) -> None:
        """Raises: OSError if nothing can be written there."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob(f"events.out.tfevents.*{_SUFFIX}"):
            old.unlink()
        self._written: set[_Id] = set()
        self._resumed: set[int] = set()
        self._writer = self._open(None)

    def write(self, history: History) -> int:
        """Add what is new, and have TensorBoard forget what a resume has discarded. Returns the number of rows."""
        for epoch, step in sorted(resumed_at(history).items()):
            if epoch not in self._resumed:
                self._resumed.add(epoch)
                self._forget_after(step)
        rows = [
            row for kind in (*_SCALARS, "sample") for row in rows_of(history, kind) if _id(row) not in self._written
        ]
        for row in rows:
            self._add(row)
            self._written.add(_id(row))
        self._writer.flush()
        return len(rows)

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()

    def _forget_after(self, step: int) -> None:
        if self._written:
            self._writer.close()
            self._writer = self._open(step + 1)

    def _open(self, purge_step: int | None) -> SummaryWriter:
        # Two files of one second must not share a name, and TensorBoard reads them in the order of their names.
        suffix = f".{len(self._resumed):06d}{_SUFFIX}"
        return SummaryWriter(str(self._directory), filename_suffix=suffix, purge_step=purge_step)

    def _add(self, row: AnyRow) -> None:
        if isinstance(row, SampleRow):
            said = f"**reward {row.reward:g}**, version {row.version}, {row.searcher}"
            self._writer.add_text(
                "sample", f"{said}\n\n{_code(row.prompt)}\n\n{_code(row.response)}", row.step, row.time
            )
            return
        for name, value in scalars(row).items():
            self._writer.add_scalar(f"{row.kind}/{name.replace('.', '/')}", value, row.step, row.time)
        if isinstance(row, StepRow) and row.staleness:
            self._add_staleness(row)

    def _add_staleness(self, row: StepRow) -> None:
        counts = row.staleness
        self._writer.add_histogram_raw(
            "step/staleness",
            min=min(counts),
            max=max(counts),
            num=sum(counts.values()),
            sum=sum(steps * rows for steps, rows in counts.items()),
            sum_squares=sum(steps * steps * rows for steps, rows in counts.items()),
            bucket_limits=[steps + 0.5 for steps in range(min(counts), max(counts) + 1)],
            bucket_counts=[counts.get(steps, 0) for steps in range(min(counts), max(counts) + 1)],
            global_step=row.step,
            walltime=row.time,
        )


def _id(row: AnyRow) -> _Id:
    return row.kind, row.epoch, row.step, row.policy_epoch if isinstance(row, EvalRow) else 0


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
