"""The contract of `RecordStore` as a pytest suite, for any store.

To run it against yours, write:

    class TestMyStore(RecordStoreContract):
        @pytest.fixture
        def make_store(self, tmp_path):
            numbers = itertools.count()
            return lambda max_bytes: MyStore(tmp_path / str(next(numbers)), max_bytes=max_bytes)

Each test is one promise of `recorder_core.stores.base`. Time is real: the suite sleeps for a few
seconds in all. Where failures should show values, put
`pytest.register_assert_rewrite("recorder_core.stores.testing")` into your `conftest.py`.
"""

from recorder_core.stores.testing.accounts import AccountsContract
from recorder_core.stores.testing.given import (
    ALL,
    KEY,
    LONG_S,
    OTHER,
    SHORT_S,
    GivenStore,
    add,
    child,
    drain,
    held,
    names,
    root,
    run_of,
    run_out,
)
from recorder_core.stores.testing.leases import LeasesContract
from recorder_core.stores.testing.records import RecordsContract
from recorder_core.stores.testing.runs import RunsContract
from recorder_core.stores.testing.selections import SelectionsContract
from recorder_core.stores.testing.sequences import RandomSequence, check_accounts
from recorder_core.stores.testing.threads import ThreadsContract


class RecordStoreContract(
    RecordsContract,
    RunsContract,
    SelectionsContract,
    LeasesContract,
    AccountsContract,
    ThreadsContract,
):
    """What every store keeps. Subclass it, name the class `Test...`, override `make_store`."""


__all__ = [
    "ALL",
    "KEY",
    "LONG_S",
    "OTHER",
    "SHORT_S",
    "GivenStore",
    "RandomSequence",
    "RecordStoreContract",
    "add",
    "check_accounts",
    "child",
    "drain",
    "held",
    "names",
    "root",
    "run_of",
    "run_out",
]
