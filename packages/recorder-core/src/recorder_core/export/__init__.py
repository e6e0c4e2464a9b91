"""Recorded experiences for any trainer: one normal form, and converters from it.

`rows` makes the normal form, numpy only; `group_advantages` adds advantages; the modules beside
make of it what each trainer takes. Trainers are imported where they are needed and are never
required. `export.parquet` and `export.datasets` need pyarrow, and are imported by themselves.

    batch = export.rows(drained.experiences)
    batch = export.group_advantages(batch)
    samples = export.trl.rollout_samples(batch)
"""

from recorder_core.errors import ExportError
from recorder_core.export import atif, dicts, harbor, skyrl, tinker, transfer_queue, trl, verl
from recorder_core.export.advantages import group_advantages
from recorder_core.export.batch import Batch, Row, Run
from recorder_core.export.normal import rows
from recorder_core.export.report import Report
from recorder_core.export.rules import Rules, int_label

__all__ = [
    "Batch",
    "ExportError",
    "Report",
    "Row",
    "Rules",
    "Run",
    "atif",
    "dicts",
    "group_advantages",
    "harbor",
    "int_label",
    "rows",
    "skyrl",
    "tinker",
    "transfer_queue",
    "trl",
    "verl",
]
