"""The kit for transports: subclass `TransportTests`, say which transport and where, and pytest collects the tests.

Each test opens a run of its own, with sides that each open it for themselves, and stands for one guarantee that the
publisher, the subscriber, or whoever reads a store relies on. `docs/plugins.md` says what each of them means.
"""

from __future__ import annotations

from dcr.testing.conformance.answers import AnswerTests
from dcr.testing.conformance.cancellation import CancellationTests
from dcr.testing.conformance.closing import ClosingTests
from dcr.testing.conformance.delivery import DeliveryTests
from dcr.testing.conformance.ledger import LedgerTests
from dcr.testing.conformance.objects import ObjectsTests
from dcr.testing.conformance.storage import StoreTests
from dcr.testing.conformance.writers import WriterTests

__all__ = ["ObjectsTests", "TransportTests"]


class TransportTests(LedgerTests, DeliveryTests, WriterTests, AnswerTests, CancellationTests, ClosingTests, StoreTests):
    """Everything that a transport has to hold.

    Say `transport` and `url`; a store that `dcr.stored` did not make overrides `remove_part` and `truncate_part` too.
    """
