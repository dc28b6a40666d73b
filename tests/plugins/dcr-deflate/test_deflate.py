"""The conformance kit over this codec: `pytest test_deflate.py`, with the distribution installed."""

from dcr_deflate import CODEC

import dcr.testing


class TestDeflate(dcr.testing.CodecTests):
    codec = CODEC
