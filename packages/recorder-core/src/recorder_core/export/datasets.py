"""Files of experiences for PyTorch's `DataLoader`.

Needs torch and pyarrow: `pip install recorder-core[parquet,torch]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.utils.data import IterableDataset, get_worker_info

from recorder_core.experience import Experience
from recorder_core.export import parquet


class ExperienceDataset(IterableDataset[Experience]):
    """The experiences of Parquet files, streamed; several workers share the row groups.

    Args:
        paths: Files of `export.parquet`.
        rank: Which of the data-parallel ranks this is.
        ranks: How many share the files.

    Example:
        >>> loader = DataLoader(
        ...     ExperienceDataset(["batch-12.parquet"]),
        ...     batch_size=64,
        ...     num_workers=4,
        ...     collate_fn=lambda batch: collate_padded(batch, pad_token_id=0),
        ... )
    """

    def __init__(self, paths: Sequence[str | Path], *, rank: int = 0, ranks: int = 1) -> None:
        self._paths = paths
        self._rank = rank
        self._ranks = ranks

    def __iter__(self) -> Iterator[Experience]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        for path in self._paths:
            yield from parquet.read(
                path, part=self._rank * workers + number, parts=self._ranks * workers
            )
